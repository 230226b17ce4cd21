"""What a calibration costs: seconds and memory of its stages, and when that has paid off."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import psutil
import torch

INTERVAL = 0.005  # seconds between two looks at the memory


class Stages:
    """Seconds and memory of named stages; a name that comes again adds to its seconds.

    Memory is the most that the process, and a CUDA device, held during a stage beyond what they
    held at the start of the block. It is looked at every `INTERVAL` seconds, so a peak that is over
    sooner may be missed.

    Parameters
    ----------
    device
        Of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._process = psutil.Process()
        self._device = device if device.type == "cuda" else None
        self._stage: str | None = None
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, tuple[int, int]] = {}
        self._base = self._held()
        self._looking = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="infinigen-kv-memory", daemon=True)

    def __enter__(self) -> Stages:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What happens inside the block belongs to this stage; blocks do not nest."""
        started = time.perf_counter()
        self._stage = name
        self._look(name)
        try:
            yield
        finally:
            self._look(name)
            self._stage = None
            spent = time.perf_counter() - started
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def to_dict(self) -> dict[str, dict[str, float]]:
        """For each stage ``seconds``, ``peak_bytes`` and on a CUDA device ``device_peak_bytes``."""
        found: dict[str, dict[str, float]] = {}
        for name, seconds in self._seconds.items():
            host, device = self._peaks[name]
            found[name] = {"seconds": seconds, "peak_bytes": host}
            if self._device is not None:
                found[name]["device_peak_bytes"] = device
        return found

    def _held(self) -> tuple[int, int]:
        host = int(self._process.memory_info().rss)
        return host, 0 if self._device is None else torch.cuda.memory_allocated(self._device)

    def _look(self, name: str) -> None:
        with self._looking:  # the other thread's peak is not to be lost
            before = self._peaks.get(name, (0, 0))
            beyond = [now - base for now, base in zip(self._held(), self._base, strict=True)]
            self._peaks[name] = max(before[0], beyond[0]), max(before[1], beyond[1])

    def _watch(self) -> None:
        while not self._over.wait(INTERVAL):
            name = self._stage
            if name is not None:
                self._look(name)


def total_seconds(cost: Any) -> float:
    """Seconds of all stages; NaN where nothing is known."""
    return sum(each["seconds"] for each in cost.values()) if cost else math.nan


def break_even_tokens(
    calibration_seconds: float, slow_step: float, fast_step: float
) -> float | None:
    """Generated tokens after which a calibration has paid off: its time over what a step saves.

    Parameters
    ----------
    calibration_seconds
        What calibrating took.
    slow_step, fast_step
        Seconds of a decode step without what the calibration allows, e.g. ``stream``, and with it.

    Returns
    -------
    float or None
        None where a step saves nothing.
    """
    saved = slow_step - fast_step
    return calibration_seconds / saved if saved > 0 else None
