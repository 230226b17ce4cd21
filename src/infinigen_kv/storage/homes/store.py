"""Stores: packed entries as rows of bytes, without any idea of what they mean.

A codec (`codec`) packs the key and value of one token and KV head into E bytes. A store keeps
``(B, H_kv, T, E)`` of them and is all that a link reads from and writes to.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from infinigen_kv.storage.homes.buffer import TokenBuffer
from infinigen_kv.storage.homes.pinned import HostMemory


class PendingRead(Protocol):
    """Entries on their way out of a store."""

    def wait(self) -> Tensor:
        """``(B, H_kv, n, E)`` uint8, once they are here."""


class Store(Protocol):
    """Packed entries of one layer of one cache; a token's slot is the same in all heads."""

    @property
    def rows(self) -> int:
        """Batch rows B."""

    @property
    def heads(self) -> int:
        """KV heads H_kv."""

    @property
    def entry_bytes(self) -> int:
        """E."""

    @property
    def length(self) -> int:
        """Slots in use per row."""

    @property
    def nbytes(self) -> int:
        """Bytes reserved where the store lives."""

    def append(self, entries: Tensor) -> None:
        """Add tokens: ``(B, H_kv, Q, E)`` uint8."""

    def write(self, slots: Tensor, entries: Tensor) -> None:
        """Overwrite slots ``(B, Q)`` with ``(B, H_kv, Q, E)``; a slot of -1 is skipped."""

    def read(self, slots: Tensor) -> Tensor:
        """Entries ``(B, H_kv, n, E)`` of the slots ``(B, H_kv, n)``; waits for them."""

    def read_all(self) -> Tensor:
        """All entries ``(B, H_kv, T, E)``; waits for them. Not to be kept or written to."""

    def start_read(self, slots: Tensor) -> PendingRead:
        """As `read`, without waiting: returns what the slots hold now."""

    def start_read_all(self) -> PendingRead:
        """As `read_all`, without waiting: returns what the store holds now."""

    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on."""

    def take_rows(self, index: Tensor) -> None:
        """Become the batch rows ``index`` ``(n,)``, repeats allowed."""

    def close(self) -> None:
        """Release what the store holds outside of memory; may be called twice."""


class RamStore:
    """Packed entries in host memory, which ``memory`` gives out (None: pageable memory)."""

    def __init__(
        self,
        rows: int,
        heads: int,
        entry_bytes: int,
        capacity: int = 0,
        memory: HostMemory | None = None,
    ) -> None:
        self.heads = heads
        self.entry_bytes = entry_bytes
        self._buffer = TokenBuffer(
            rows,
            heads,
            entry_bytes,
            dtype=torch.uint8,
            device=torch.device("cpu"),
            capacity=capacity,
            memory=memory,
        )

    @property
    def rows(self) -> int:
        return self._buffer.rows

    @property
    def capacity(self) -> int:
        """Slots that fit before the memory is replaced by a larger piece."""
        return self._buffer.capacity

    @property
    def is_pinned(self) -> bool:
        """Whether a CUDA device can read the entries where they are."""
        return self._buffer.is_pinned

    @property
    def length(self) -> int:
        return self._buffer.length

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def append(self, entries: Tensor) -> None:
        self._buffer.extend(entries.shape[2]).copy_(entries)

    def write(self, slots: Tensor, entries: Tensor) -> None:
        self._buffer.write(slots, entries)

    def reserve(self, slots: int) -> None:
        """Make room for ``slots`` slots in total."""
        self._buffer.reserve(slots)

    def read(self, slots: Tensor) -> Tensor:
        return self._buffer.gather(slots)

    def read_into(self, slots: Tensor, out: Tensor) -> None:
        """As `read`, into ``out`` ``(B, H_kv, n, E)``, contiguous."""
        self._buffer.gather_into(slots, out)

    def lines(self) -> Tensor:
        """All entries, unused slots included, one head after the other:
        ``(B * H_kv * capacity, E)``, sharing memory.
        """
        return self._buffer.lines()

    def read_all(self) -> Tensor:
        return self._buffer.view()

    def start_read(self, slots: Tensor) -> PendingRead:
        return _Ready(self.read(slots))

    def start_read_all(self) -> PendingRead:
        return _Ready(self.read_all().clone())  # what is appended or overwritten later is not in it

    def truncate(self, length: int) -> None:
        self._buffer.truncate(length)

    def take_rows(self, index: Tensor) -> None:
        self._buffer.take_rows(index)

    def close(self) -> None:
        """Nothing is held outside of memory."""


class _Ready(NamedTuple):
    """A read from memory, which is over when it has started."""

    entries: Tensor

    def wait(self) -> Tensor:
        return self.entries
