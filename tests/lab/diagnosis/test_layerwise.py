"""One layer's selection at a time, against caches that keep all other layers whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from calibrating import calibrate_tiny, reference, selecting, tokens
from infinigen_kv import StorageConfig, attach
from infinigen_kv.cache.forward import forward, prefill
from infinigen_kv.policies.full import FullPolicy
from infinigen_kv_lab.diagnosis.layerwise import LayerwiseKL, selecting_only
from tiny import TINY

PROMPT, DECODED = 60, 20
IDS = tokens(1, PROMPT + DECODED, seed=5)


def divergence(full: Tensor, other: Tensor) -> float:
    first, second = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return (first.exp() * (first - second)).sum(-1).mean().item()


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt"])
@torch.no_grad()
def test_a_layer_alone_selects_as_if_the_others_were_resident(family: str) -> None:
    model = TINY[family]()
    calibration, config = calibrate_tiny(model), selecting()
    expected: dict[tuple[int, ...], float] = {}
    full = reference(model, IDS, prompt=PROMPT)[0, PROMPT:]
    with attach(model, calibration, config) as session:
        apart = [spec.index for spec in session.adapter.layers if not spec.is_sliding]
        meter = LayerwiseKL(session, IDS[0, :PROMPT], IDS[0, PROMPT:])
        selecting_layers = tuple(layer for layer in apart if layer > 0)
        cases = [*((layer,) for layer in selecting_layers), selecting_layers, ()]
        found = {case: meter.kl(case) for case in cases}
        assert [meter.kl(case) for case in cases] == list(found.values())  # nothing is left behind
    for case in cases:
        others = tuple(layer for layer in apart if layer not in case)
        storage = StorageConfig(resident_layers=others)
        with attach(model, calibration, config, storage) as session:
            cache = session.new_cache()
            prefill(session, cache, IDS[:, :PROMPT])
            with cache.decoding():
                logits = forward(model, IDS[:, PROMPT:], cache)[0]
        expected[case] = divergence(full, logits)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert found[()] == pytest.approx(0.0, abs=1e-5)
    assert all(found[case] > 1e-4 for case in cases if case)


def test_policies_come_back_after_an_error() -> None:
    model = TINY["llama"]()
    with attach(model, calibrate_tiny(model), selecting()) as session:
        cache = session.new_cache()
        before = [layer.policy for layer in cache.offloaded]
        with selecting_only(cache, {2}):
            inside = [isinstance(layer.policy, FullPolicy) for layer in cache.offloaded]
        assert inside == [True, True, False, True]
        with pytest.raises(ZeroDivisionError), selecting_only(cache, {1}):
            raise ZeroDivisionError
        assert [layer.policy for layer in cache.offloaded] == before
