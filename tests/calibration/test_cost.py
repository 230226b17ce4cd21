"""What a calibration cost, and when it has paid off."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from infinigen_kv.calibration import cost
from infinigen_kv.calibration.cost import Stages, break_even_tokens, total_seconds
from waiting import PATIENCE

CPU = torch.device("cpu")


class Memory:
    """Stands for what the process holds.

    That depends on the allocator and on what the system pages out.
    """

    def __init__(self, rss: int) -> None:
        self.owner = threading.current_thread()
        self.set(rss)

    def set(self, rss: int) -> None:
        self.rss = rss
        self.watched = threading.Event()  # whether another thread has looked since

    def info(self) -> SimpleNamespace:
        watched, found = self.watched, SimpleNamespace(rss=self.rss)
        if threading.current_thread() is not self.owner:
            watched.set()
        return found


def test_stages_add_up_and_know_their_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(500)
    monkeypatch.setattr(cost.psutil.Process, "memory_info", lambda process: memory.info())
    started = time.perf_counter()
    with Stages(CPU) as stages:
        with stages.stage("first"):
            memory.set(800)  # over before the stage ends: the watching thread must see it
            assert memory.watched.wait(PATIENCE)
            memory.set(500)
        for held in (540, 520):
            with stages.stage("second"):
                memory.set(held)
                time.sleep(0.01)
        spent = time.perf_counter() - started
    found = stages.to_dict()
    assert list(found) == ["first", "second"]
    assert found["first"]["peak_bytes"] == 300
    assert found["second"]["peak_bytes"] == 40
    assert found["second"]["seconds"] >= 0.02
    assert sum(each["seconds"] for each in found.values()) <= spent
    assert set(found["first"]) == {"seconds", "peak_bytes"}  # without a CUDA device


def test_memory_is_that_of_this_process() -> None:
    with Stages(CPU) as stages, stages.stage("only"):
        pass
    held = stages._base[0]
    assert 0.2 < held / psutil.Process().memory_info().rss < 5


def test_a_stage_that_fails_still_ends_and_leaves_no_thread() -> None:
    stages = Stages(CPU)
    with pytest.raises(KeyboardInterrupt), stages, stages.stage("broken"):
        raise KeyboardInterrupt
    assert not stages._thread.is_alive()
    assert list(stages.to_dict()) == ["broken"]


def test_when_it_has_paid_off() -> None:
    # 30 s of calibration, 0.2 s saved a step
    assert break_even_tokens(30.0, 0.25, 0.05) == pytest.approx(150.0)
    assert break_even_tokens(30.0, 0.05, 0.05) is None
    assert break_even_tokens(30.0, 0.05, 0.06) is None


def test_all_stages_together() -> None:
    stages = {"a": {"seconds": 1.5, "peak_bytes": 3}, "b": {"seconds": 2.0, "peak_bytes": 0}}
    assert total_seconds(stages) == 3.5
    assert math.isnan(total_seconds({}))
