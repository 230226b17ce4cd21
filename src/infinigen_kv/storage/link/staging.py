"""Pinned buffers through which host memory reaches a device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from infinigen_kv.storage.homes.pinned import pinned
from infinigen_kv.storage.link.streams import Event

BUFFERS = 4  # transfers that may be under way before the host has to wait for the oldest


class StagingBuffer:
    """Host bytes, free again once the copy out of them is over."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._copied: Event | None = None

    def claim(self, shape: tuple[int, ...], allocate: Callable[[int], Tensor]) -> Tensor:
        """Bytes to fill, ``shape``; waits for the copy of what was in them before."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        nbytes = math.prod(shape)
        if nbytes > self._bytes.numel():
            self._bytes = allocate(nbytes)
        return self._bytes[:nbytes].view(shape)

    def release(self, copied: Event) -> None:
        """Say when the copy out of the buffer, queued by now, is over."""
        self._copied = copied


class StagingRing:
    """`StagingBuffer` in turn, each growing to what it had to hold."""

    def __init__(self, buffers: int = BUFFERS) -> None:
        self._buffers = [StagingBuffer() for _ in range(buffers)]
        self._next = 0

    def take(self) -> StagingBuffer:
        """The buffer that was used longest ago; `claim` it, queue the copy, `release` it."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        return buffer

    def clear(self) -> None:
        """Drop the memory; PyTorch keeps it alive for the copies under way."""
        self._buffers = [StagingBuffer() for _ in self._buffers]


def staging_size(nbytes: int) -> int:
    """Bytes of a buffer for a transfer of ``nbytes``, with some room to grow."""
    return nbytes + nbytes // 2


def staging_bytes(nbytes: int) -> Tensor:
    """A buffer of `staging_size`, pinned; pageable where the system refuses to pin."""
    size = staging_size(nbytes)
    found = pinned((size,), torch.uint8)
    if found is not None:
        return found
    # A copy from pageable memory may keep the host waiting, but is as right.
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8)
