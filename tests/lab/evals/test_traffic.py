"""Bytes that steps take from a home, against what a link has moved; bytes that caches hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from calibrating import selecting, tokens
from infinigen_kv import Calibration, StorageConfig, attach
from infinigen_kv.cache.forward import forward, prefill
from infinigen_kv_lab.evals.reading import Reader
from linking import APART

PROMPT, LENGTH = 40, 64
IDS = tokens(1, LENGTH, seed=9)[0]
LAYERS, HEADS, NUMBERS = 4, 2, 2 * 16  # of the tiny model: an entry is a key and a value
WHOLE = StorageConfig(resident_layers=())


def read(
    model: PreTrainedModel, calibration: Calibration, policy: str, storage: StorageConfig
) -> Reader:
    with attach(model, calibration, selecting(), storage) as session:
        reader = Reader(session, policy)
        reader.start(IDS[:PROMPT], room=LENGTH - PROMPT).feed(IDS[PROMPT:])
    return reader


@torch.no_grad()
@pytest.mark.parametrize("policy", ["infinigen", "infinigen-paper", "stream", "h2o"])
def test_they_are_what_a_link_without_a_resident_set_moves(
    policy: str, model: PreTrainedModel, calibration: Calibration
) -> None:
    found = read(model, calibration, policy, WHOLE).fetched_bytes
    storage = StorageConfig(resident_layers=(), **APART["emulated"])
    with attach(model, calibration, selecting(), storage) as session:
        cache = session.new_cache(tokens=LENGTH, policy=policy)
        prefill(session, cache, IDS[None, :PROMPT])
        cache.reset_statistics()
        for at in range(PROMPT, LENGTH):
            forward(model, IDS[None, at : at + 1], cache)
        moved = cache.storage.link.statistics.bytes_down
    # the first layer is fetched ahead for a next step, once more than there are steps
    extra = 0 if policy == "h2o" else LENGTH * HEADS * NUMBERS * 4
    assert found == pytest.approx((moved - extra) / (LENGTH - PROMPT))


def test_a_codec_makes_entries_smaller_and_a_limit_their_number(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    cached = sum(range(PROMPT, LENGTH)) / (LENGTH - PROMPT)
    one = LAYERS * HEADS * NUMBERS * 4  # bytes of a token, float32
    assert read(model, calibration, "stream", WHOLE).fetched_bytes == pytest.approx(cached * one)
    packed = LAYERS * HEADS * (NUMBERS + 2 * 4)  # a byte a number, scale and zero of the value
    int8 = replace(WHOLE, codec="int8")
    assert read(model, calibration, "stream", int8).fetched_bytes == pytest.approx(cached * packed)
    limited = replace(WHOLE, capacity=30)
    assert read(model, calibration, "stream", limited).fetched_bytes == pytest.approx(30 * one)


def test_layers_kept_on_the_device_have_no_traffic(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    kept = replace(WHOLE, capacity=1.0, resident_layers=(0, 2))
    limited = replace(WHOLE, capacity=1.0)
    ours = read(model, calibration, "infinigen", kept)
    assert 0.0 < ours.fetched_bytes < read(model, calibration, "infinigen", limited).fetched_bytes
    assert set(ours._token_bytes) == {1, 3}


def test_what_is_held_where(model: PreTrainedModel, calibration: Calibration) -> None:
    least = LENGTH * LAYERS * HEADS * NUMBERS * 4
    home, device = read(model, calibration, "ideal", WHOLE).held_bytes
    assert home == 0 and device >= least
    home, device = read(model, calibration, "infinigen", WHOLE).held_bytes
    assert home >= least and device > 0  # the partial keys
    packed, scales = read(model, calibration, "stream", replace(WHOLE, codec="int4")).held_bytes
    assert 0 < packed < home / 3 and scales > 0
    assert read(model, calibration, "ideal", WHOLE).fetched_bytes == 0.0
