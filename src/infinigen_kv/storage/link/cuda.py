"""How a CUDA device reaches a store in host memory or on disk.

Order of hand-offs (``compute`` is the stream that the model runs on, ``down`` and ``up`` the side
streams; the host never waits for the whole device):

* read, gathered by the host: host gathers into a staging buffer -> ``down`` copies it ->
  ``compute`` waits for that copy in `_Arrival.wait`. The buffer is filled anew only after its copy.
* read by the device (all entries, or the Triton kernel): ``down`` reads the home's own memory ->
  ``compute`` waits. The host changes that memory only after the read is over (`_quiesce`).
* append: ``compute`` has made the entries -> ``up`` waits for it and copies them into pinned memory
  -> the host waits for that copy and appends to the store, before anything else is asked of the
  store (`_settle`), which is a step later as a rule.
"""

from __future__ import annotations

import copy
import logging
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infinigen_kv.storage.homes.pinned import pinned
from infinigen_kv.storage.homes.store import PendingRead, RamStore, Store
from infinigen_kv.storage.link.lane import Gather, Lane
from infinigen_kv.storage.link.staging import staging_bytes
from infinigen_kv.storage.link.streams import Event, SideStreams

_log = logging.getLogger(__name__)

TRIALS = 3  # reads of each kind when the faster one is looked for


class _Append(NamedTuple):
    """Entries on their way from the device; in ``entries`` once ``arrived``."""

    entries: Tensor
    arrived: Event


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Entries on their way to the device."""

    streams: SideStreams
    entries: Tensor
    arrived: Event

    def wait(self) -> Tensor:
        """The entries; the compute stream waits for them, the host does not."""
        self.streams.hand_over(self.arrived, self.entries)
        return self.entries

    def __deepcopy__(self, memo: dict[int, Any]) -> _Arrival:
        """The same one: what arrives is only read."""
        return self


@dataclass(frozen=True, slots=True)
class _HostArrival:
    """Entries that a disk brings to the host first."""

    streams: SideStreams
    pending: PendingRead

    def wait(self) -> Tensor:
        entries = self.pending.wait()
        target = self.streams.empty(tuple(entries.shape))
        self.streams.copy("down", target, entries)
        copied = self.streams.record("down")
        copied.synchronize()  # `entries` is dropped here; beside the disk's time this is nothing
        return _Arrival(self.streams, target, copied).wait()


class CudaStore:
    """A store as a CUDA device sees it: entries come from the device and go to it.

    Implements `storage.homes.store.Store`. One thread at a time may call it.

    Parameters
    ----------
    inner
        The store on the host.
    lane
        To the device.
    """

    def __init__(self, inner: Store, lane: Lane) -> None:
        self.inner = inner
        self._lane = lane
        self._append: _Append | None = None
        self._reads: list[Event] = []  # of the store's own memory, perhaps under way
        self._offsets: tuple[tuple[int, int, int], Tensor] | None = None

    @property
    def rows(self) -> int:
        return self.inner.rows

    @property
    def heads(self) -> int:
        return self.inner.heads

    @property
    def entry_bytes(self) -> int:
        return self.inner.entry_bytes

    @property
    def length(self) -> int:
        coming = 0 if self._append is None else self._append.entries.shape[2]
        return self.inner.length + coming

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def append(self, entries: Tensor) -> None:
        self._settle()
        streams = self._lane.streams
        shape = tuple(entries.shape)
        host = pinned(shape, torch.uint8) if entries.device == streams.device else None
        if host is None:  # already on the host, or no pinned memory: the store copies and waits
            self._quiesce()
            self.inner.append(entries)
            return
        if isinstance(self.inner, RamStore):
            self._reserve(self.inner, entries.shape[2])
        streams.after_compute("up", entries)
        streams.copy("up", host, entries)
        self._append = _Append(host, streams.record("up"))

    def write(self, slots: Tensor, entries: Tensor) -> None:
        self._settle()
        self._quiesce()
        self.inner.write(slots.cpu(), entries.cpu())

    def read(self, slots: Tensor) -> Tensor:
        return self.start_read(slots).wait()

    def read_all(self) -> Tensor:
        return self.start_read_all().wait()

    def start_read(self, slots: Tensor) -> PendingRead:
        self._settle()
        if not isinstance(self.inner, RamStore):
            return _HostArrival(self._lane.streams, self.inner.start_read(slots.cpu()))
        if self._lane.gather == "host" or slots.numel() == 0 or not self.inner.is_pinned:
            return self._gather_on_host(self.inner, slots)
        if self._lane.gather == "auto":
            self._lane.gather = self._faster(self.inner, slots)
            return self.start_read(slots)
        return self._gather_on_device(self.inner, slots)

    def start_read_all(self) -> PendingRead:
        self._settle()
        streams = self._lane.streams
        if not isinstance(self.inner, RamStore):
            return _HostArrival(streams, self.inner.start_read_all())
        entries = self.inner.read_all()
        target = streams.empty(tuple(entries.shape))
        # Pinned or not: what is copied does not change before `_quiesce`.
        for row in range(self.rows):  # a head's entries are contiguous, all heads' are not
            for head in range(self.heads):
                streams.copy("down", target[row, head], entries[row, head])
        return self._started(target)

    def truncate(self, length: int) -> None:
        if self._append is not None and length <= self.inner.length:
            self._append = None  # PyTorch keeps the memory until the copy into it is over
        self._settle()
        self._quiesce()
        self.inner.truncate(length)

    def take_rows(self, index: Tensor) -> None:
        self._settle()
        self._quiesce()
        self.inner.take_rows(index)

    def close(self) -> None:
        self._append = None
        with suppress(RuntimeError):  # a device that is gone reads nothing any more
            self._quiesce()
        self._reads = []
        self.inner.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> CudaStore:
        self._settle()
        self._quiesce()
        return CudaStore(copy.deepcopy(self.inner, memo), self._lane)

    # Parts of the above.

    def _settle(self) -> None:
        """Put entries that came from the device into the store; waits until they are here."""
        if self._append is None:
            return
        self._append.arrived.synchronize()
        self._quiesce()
        self.inner.append(self._append.entries)
        self._append = None  # only now: a failure must not lose them

    def _quiesce(self) -> None:
        """Wait until the device does not read the store's memory, which is about to change."""
        for event in self._reads:
            event.synchronize()
        self._reads = []

    def _reserve(self, store: RamStore, tokens: int) -> None:
        """Find out now, not a step later, if the host's memory does not suffice."""
        if store.length + tokens > store.capacity:
            self._quiesce()
            store.reserve(store.length + tokens)

    def _started(self, target: Tensor) -> _Arrival:
        """A read of the store's own memory that was queued."""
        arrived = self._lane.streams.record("down")
        self._reads = [event for event in self._reads if not event.query()]
        self._reads.append(arrived)
        return _Arrival(self._lane.streams, target, arrived)

    def _gather_on_host(self, store: RamStore, slots: Tensor) -> _Arrival:
        streams = self._lane.streams
        shape = (*slots.shape, self.entry_bytes)
        slots = slots.cpu()  # waits for the selection, and for nothing after it
        buffer = self._lane.staging.take()
        staged = buffer.claim(shape, staging_bytes)
        store.read_into(slots, staged)
        target = streams.empty(shape)
        streams.copy("down", target, staged)
        arrived = streams.record("down")
        buffer.release(arrived)
        return _Arrival(streams, target, arrived)

    def _gather_on_device(self, store: RamStore, slots: Tensor) -> _Arrival:
        streams, kernel = self._lane.streams, self._lane.kernel
        assert kernel is not None
        lines = store.lines()
        index = (slots + self._head_offsets(lines.shape[0], slots.device)).flatten()
        target = streams.empty((*slots.shape, self.entry_bytes))
        streams.after_compute("down", index)
        with streams.running("down"):
            kernel(lines, index, target.view(-1, self.entry_bytes))
        return self._started(target)

    def _head_offsets(self, lines: int, device: torch.device) -> Tensor:
        """``(B, H_kv, 1)``: where each head starts among the store's lines."""
        key = (self.rows, self.heads, lines)
        if self._offsets is None or self._offsets[0] != key:
            heads = self.rows * self.heads
            starts = torch.arange(heads, device=device) * (lines // heads)
            self._offsets = key, starts.view(self.rows, self.heads, 1)
        return self._offsets[1]

    def _faster(self, store: RamStore, slots: Tensor) -> Gather:
        """Who gathers these slots faster; the host where the kernel does not run."""
        try:
            self._seconds(self._gather_on_device, store, slots)  # compiles
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            _log.warning("the Triton gather does not work here, the host gathers: %s", error)
            return "host"
        device = self._seconds(self._gather_on_device, store, slots)
        return "device" if device < self._seconds(self._gather_on_host, store, slots) else "host"

    @staticmethod
    def _seconds(
        gather: Callable[[RamStore, Tensor], _Arrival], store: RamStore, slots: Tensor
    ) -> float:
        slots.cpu()  # the time that the selection itself takes is no part of it
        times = []
        for _ in range(TRIALS):
            started = time.perf_counter()
            gather(store, slots).arrived.synchronize()
            times.append(time.perf_counter() - started)
        return min(times)
