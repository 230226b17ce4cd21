"""Side streams without a GPU that do everything as late as they are allowed to.

Nothing that is queued happens before somebody waits for it. So what is read, overwritten or given
away too early is seen in the result, each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from infinigen_kv.storage import storage as storage_module
from infinigen_kv.storage.homes import pinned as pinned_module
from infinigen_kv.storage.homes.buffer import TokenBuffer
from infinigen_kv.storage.link import cuda, staging
from infinigen_kv.storage.link.lane import Gather, Lane
from infinigen_kv.storage.link.streams import Event, Way

UNWRITTEN = 0xAB


@dataclass
class Queue:
    """Work of one stream."""

    waiting: list[Callable[[], object]] = field(default_factory=list)
    done: int = 0

    def run(self, until: int) -> None:
        while self.done < until:
            self.waiting.pop(0)()
            self.done += 1


@dataclass(frozen=True)
class LateEvent:
    """A point in a `Queue`."""

    queue: Queue
    place: int

    def query(self) -> bool:
        return self.queue.done >= self.place

    def synchronize(self) -> None:
        self.queue.run(self.place)


class LateStreams:
    """`SideStreams` on the CPU. The compute stream is the caller itself, and never late."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.queues: dict[Way, Queue] = {"down": Queue(), "up": Queue()}
        self.copies = 0

    def after_compute(self, way: Way, *used: Tensor) -> None:
        pass

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, UNWRITTEN, dtype=torch.uint8)

    def copy(self, way: Way, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape
        self.copies += 1
        self.queues[way].waiting.append(lambda: target.copy_(source))

    @contextmanager
    def running(self, way: Way) -> Iterator[None]:
        yield

    def record(self, way: Way) -> LateEvent:
        queue = self.queues[way]
        return LateEvent(queue, queue.done + len(queue.waiting))

    def hand_over(self, event: Event, tensor: Tensor) -> None:
        event.synchronize()

    def gather_rows(self, source: Tensor, index: Tensor, target: Tensor) -> None:
        """Stands for the kernel: reads the home's memory late."""
        self.queues["down"].waiting.append(lambda: target.copy_(source[index]))


def late_lane(gather: Gather = "auto", *, kernel: bool = True) -> tuple[Lane, LateStreams]:
    """A lane to a device that is this machine's CPU."""
    streams = LateStreams()
    return Lane(streams, gather, streams.gather_rows if kernel else None), streams


def pretend_to_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary memory passes for pinned memory."""

    def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype).fill_(UNWRITTEN)

    for module in (pinned_module, cuda, staging):
        monkeypatch.setattr(module, "pinned", pinned)
    monkeypatch.setattr(TokenBuffer, "is_pinned", property(lambda self: self._memory is not None))


def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> list[LateStreams]:
    """Caches take this machine's CPU for a CUDA device; the streams that they make."""
    pretend_to_pin(monkeypatch)
    made: list[LateStreams] = []

    def on(device: torch.device, gather: Gather) -> Lane:
        lane, streams = late_lane(gather)
        made.append(streams)
        return lane

    monkeypatch.setattr(storage_module, "needs_lane", lambda device: True)
    monkeypatch.setattr(storage_module.Lane, "on", on)
    return made
