"""One block's time, on a clock that only the model's parts move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tiny
from calibrating import calibrate_tiny, selecting, tokens
from infinigen_kv import Calibration, InputError, attach
from infinigen_kv.cache.forward import prefill
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv_lab.figures.speed import block_times as block_times_module
from infinigen_kv_lab.figures.speed.block_times import BlockTimer, split_blocks

PROMPT, STEPS = 40, 4
FAST = StorageConfig(link="emulated:1000", resident_layers=())


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


class Clock:
    """Seconds that pass only where a part of the model says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def passing(self, call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            self.now += seconds
            return call(*given, **named)

        return run


def test_each_part_gets_its_own_time(
    llama: tuple[Any, Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calibration = llama
    clock = Clock()
    monkeypatch.setattr(block_times_module, "time", clock)
    for block in model.model.layers:
        parts = ((block.mlp, 3.0), (block.input_layernorm, 0.5), (block.self_attn.o_proj, 2.0))
        for part, seconds in parts:
            monkeypatch.setattr(part, "forward", clock.passing(part.forward, seconds))
    with attach(model, calibration, selecting(), FAST) as session:
        cache = session.new_cache(tokens=PROMPT + 2)
        monkeypatch.setattr(cache, "attention_input", clock.passing(cache.attention_input, 1.0))
        prefill(session, cache, tokens(1, PROMPT))
        statistics, first = cache.storage.link.statistics, model.model.layers[0].self_attn
        project = first.q_proj.forward

        def waiting(*given: Any) -> Any:  # the first layer waits for the link, for 8 s
            clock.now += 8.0
            statistics.wait_seconds += 8.0
            return project(*given)

        monkeypatch.setattr(first.q_proj, "forward", waiting)
        timer = BlockTimer(session)
        real, statistics.wait_seconds = statistics.wait_seconds, 0.0
        with timer.timing(), torch.no_grad():
            logits, times = timer.step(tokens(1, 1), cache)
        assert real >= 0 and logits.shape == (1, 1, tiny.VOCABULARY)
    # what the link itself waited for is real time, which that clock does not know
    assert times.transfer == pytest.approx(2000.0, abs=100)
    assert times.total == pytest.approx(1e3 * (3.0 + 0.5 + 2.0 + 1.0 + 2.0))
    assert times.feed_forward == pytest.approx(3500.0, abs=100)
    assert times.attention == pytest.approx(2000.0, abs=100)
    assert times.prediction == pytest.approx(1000.0, abs=100)


def test_hooks_are_gone_afterwards(llama: tuple[Any, Calibration]) -> None:
    model, calibration = llama

    def hooks() -> int:
        return sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks)
            for module in model.modules()
        )

    with attach(model, calibration, selecting(), FAST) as session:
        before = hooks()
        timing = BlockTimer(session).timing()
        timing.__enter__()
        assert hooks() == before + 5 * len(session.adapter.layers)
        assert not timing.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        assert hooks() == before


def test_every_policy_is_split(llama: tuple[Any, Calibration]) -> None:
    with attach(*llama, selecting(), FAST) as session:
        found = split_blocks(
            session, tokens(2, PROMPT), decode_tokens=STEPS, policies=("ideal", "h2o", "infinigen")
        )
    assert list(found) == ["ideal", "h2o", "infinigen"]
    for times in found.values():
        values = times.to_dict()
        assert values["total"] == pytest.approx(
            sum(value for name, value in values.items() if name != "total")
        )
        assert values["attention"] > 0 and values["feed_forward"] > 0
    assert found["ideal"].transfer == 0


def test_more_tokens_than_positions(llama: tuple[Any, Calibration]) -> None:
    with attach(*llama) as session, pytest.raises(InputError, match="positions"):
        split_blocks(session, tokens(1, tiny.MAX_POSITIONS), decode_tokens=1, policies=("ideal",))
