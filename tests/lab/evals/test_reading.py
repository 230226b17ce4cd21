"""Readings against single decode steps and plain forwards of the model."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import PreTrainedModel

from calibrating import selecting, tokens
from infinigen_kv import Calibration, InfiniGenConfig, StorageConfig, attach
from infinigen_kv.errors import InputError
from infinigen_kv.policies.registry import POLICIES
from infinigen_kv_lab.evals.reading import BLOCK, Reader
from stepping import plain, stepped

PROMPT = 40
IDS = tokens(1, PROMPT + BLOCK + 7)[0]
IN_MEMORY = [name for name in POLICIES if not name.startswith("paging")]


@pytest.mark.parametrize("policy", IN_MEMORY)
def test_blocks_select_as_single_steps_do(
    policy: str, model: PreTrainedModel, calibration: Calibration
) -> None:
    config = selecting()
    with attach(model, calibration, config) as session:
        reader = Reader(session, policy, budget=0.3)
        reading = reader.start(IDS[:PROMPT], room=len(IDS) - PROMPT)
        blocks = list(reading.blocks(IDS[PROMPT:]))
    assert [len(block) for block in blocks] == [BLOCK, 7]
    ours = torch.cat(blocks).double().log_softmax(-1)
    steps = stepped(model, calibration, config, IDS, PROMPT, policy=policy, budget=0.3)
    torch.testing.assert_close(ours, steps, rtol=0, atol=2e-3)
    assert torch.equal(reading.last, blocks[-1][-1])
    if policy in ("ideal", "stream"):
        torch.testing.assert_close(ours, plain(model, IDS)[PROMPT:], rtol=0, atol=2e-3)
        assert reader.fetched_share == reader.fetched_share_all_layers == 1.0
    elif not policy.startswith("stream-"):
        assert 0.0 < reader.fetched_share < 0.35
        apart = ours - plain(model, IDS)[PROMPT:]
        assert apart.abs().max() > 1e-2  # it does select


def test_a_limited_home_is_fed_token_by_token(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    config, storage = selecting(), StorageConfig(capacity=60, resident_layers=())
    with attach(model, calibration, config, storage) as session:
        reading = Reader(session, "infinigen").start(IDS[:PROMPT], room=50)
        ours = reading.feed(IDS[PROMPT : PROMPT + 50]).double().log_softmax(-1)
    ids = IDS[: PROMPT + 50]
    steps = stepped(model, calibration, config, ids, PROMPT, storage=storage)
    torch.testing.assert_close(ours, steps, rtol=0, atol=1e-5)


def test_forks_part_and_leave_each_other_alone(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    config = selecting()
    first, second = IDS[PROMPT + 5 : PROMPT + 20], IDS[PROMPT + 30 : PROMPT + 45]
    start = IDS[: PROMPT + 5]
    with attach(model, calibration, config) as session:
        reader = Reader(session, "infinigen")
        reading = reader.start(IDS[:PROMPT], room=30)
        reading.feed(IDS[PROMPT : PROMPT + 5])
        fork = reading.fork()
        found = [fork.feed(first), reading.feed(second)]
    for ours, tail in zip(found, (first, second), strict=True):
        steps = stepped(model, calibration, config, torch.cat([start, tail]), PROMPT)[5:]
        torch.testing.assert_close(ours.double().log_softmax(-1), steps, rtol=0, atol=1e-3)


def test_more_prompt_is_read_in_full(model: PreTrainedModel, calibration: Calibration) -> None:
    with attach(model, calibration, selecting()) as session:
        reader = Reader(session, "infinigen")
        reading = reader.start(IDS[:PROMPT], room=20)
        more = reading.feed_prompt(IDS[PROMPT : PROMPT + 10])
        one = reading.feed_prompt(IDS[PROMPT + 10 : PROMPT + 11])
        assert math.isnan(reader.fetched_share)
        reading.feed(IDS[PROMPT + 11 : PROMPT + 15])
        assert 0.0 < reader.fetched_share < 0.35
    ours = torch.cat([more, one]).double().log_softmax(-1)
    torch.testing.assert_close(ours, plain(model, IDS)[PROMPT : PROMPT + 11], rtol=0, atol=1e-3)


def test_nothing_to_feed(model: PreTrainedModel) -> None:
    with attach(model) as session:
        reading = Reader(session, "ideal").start(IDS[:PROMPT], room=0)
        last = reading.last
        assert reading.feed(IDS[:0]).shape == reading.feed_prompt(IDS[:0]).shape == (0, 128)
        assert torch.equal(reading.last, last)
    torch.testing.assert_close(
        last.double().log_softmax(-1), plain(model, IDS)[PROMPT - 1], rtol=0, atol=1e-4
    )


def test_texts_that_do_not_fit_and_policies_that_are_not_there(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    with attach(model, calibration, InfiniGenConfig()) as session:
        with pytest.raises(InputError, match="513 tokens"):
            Reader(session, "infinigen").start(IDS[:13], room=500)
        with pytest.raises(InputError, match="empty"):
            Reader(session, "infinigen").start(IDS[:0], room=5)
        with pytest.raises(InputError, match="infinigen"):
            Reader(session, "infinigenn")
