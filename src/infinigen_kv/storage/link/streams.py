"""The two side streams of a CUDA device, and what may be asked of them.

`SideStreams` is all that the rest of the link uses, so that tests can put streams in its place that
run as late as they are allowed to.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch
from torch import Tensor

Way = Literal["down", "up"]
"""``down`` is home to device, ``up`` device to home: a stream each, since PCIe works both ways."""


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether it has been reached."""

    def synchronize(self) -> None:
        """Let the host wait until it is reached."""


class SideStreams(Protocol):
    """Streams of one device apart from the one that computes."""

    device: torch.device

    def after_compute(self, way: Way, *used: Tensor) -> None:
        """Let a side stream wait for all that the compute stream was given so far.

        ``used`` are tensors of the compute stream that the side stream will read.
        """

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Bytes on the device that the ``down`` stream is to write."""

    def copy(self, way: Way, target: Tensor, source: Tensor) -> None:
        """Queue a copy."""

    def running(self, way: Way) -> AbstractContextManager[object]:
        """Inside the block, what is launched goes to the side stream."""

    def record(self, way: Way) -> Event:
        """The point after all that a side stream was given so far."""

    def hand_over(self, event: Event, tensor: Tensor) -> None:
        """Let the compute stream wait for ``event``, after which it may read ``tensor``."""


class CudaSideStreams:
    """`SideStreams` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = {way: torch.cuda.Stream(device) for way in ("down", "up")}

    def after_compute(self, way: Way, *used: Tensor) -> None:
        side = self._streams[way]
        side.wait_event(torch.cuda.current_stream(self.device).record_event())
        for tensor in used:  # its memory must not be given away before the side stream is done
            tensor.record_stream(side)

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        # Allocated on the stream that writes it: memory that PyTorch hands out there is free of
        # earlier work on that stream, and of other streams that `record_stream` named.
        with torch.cuda.stream(self._streams["down"]):
            return torch.empty(shape, dtype=torch.uint8, device=self.device)

    def copy(self, way: Way, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._streams[way]):
            target.copy_(source, non_blocking=True)

    def running(self, way: Way) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[way])

    def record(self, way: Way) -> Event:
        return self._streams[way].record_event()

    def hand_over(self, event: Event, tensor: Tensor) -> None:
        compute = torch.cuda.current_stream(self.device)
        assert isinstance(event, torch.cuda.Event)
        compute.wait_event(event)
        # It belongs to the side stream: dropped early, its memory waits for the compute stream.
        tensor.record_stream(compute)
