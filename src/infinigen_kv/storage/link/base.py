"""The link between the stores of a cache and the device: transfers, their pace and their totals.

Order of hand-offs: a transfer reads the store when it is started, so what was appended before is in
it; its result may be used only after `Transfer.wait`; `Link.close` waits for what is under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from infinigen_kv.storage.homes.store import PendingRead, Store
from infinigen_kv.storage.link.pace import Pace


@dataclass(slots=True)
class LinkStatistics:
    """Totals since the last `reset`. Bytes down are home to device, bytes up device to home.

    ``wait_seconds`` is how long the computation stood still for transfers, ``transfer_seconds`` how
    long transfers took, waited for or not. Both are the host's: on a CUDA device a transfer is over
    for the host once its copy is queued, and the device's own wait shows in the step's time only.
    """

    bytes_down: int = 0
    bytes_up: int = 0
    transfers: int = 0
    wait_seconds: float = 0.0
    transfer_seconds: float = 0.0

    def reset(self) -> None:
        """Start to count anew."""
        self.bytes_down = self.bytes_up = self.transfers = 0
        self.wait_seconds = self.transfer_seconds = 0.0


class Transfer(Protocol):
    """Entries on their way."""

    def wait(self) -> Tensor:
        """``(B, H_kv, n, E)`` packed entries, once they have arrived."""


class Link:
    """Between stores and the device; one for all layers of a cache.

    Parameters
    ----------
    pace
        Emulates a slower link; None moves as fast as the machine does.
    queue_depth
        Threads that read a disk store at once; 0 for stores in memory, which need none.
    """

    def __init__(self, pace: Pace | None = None, *, queue_depth: int = 0) -> None:
        self.statistics = LinkStatistics()
        self.pace = pace
        self._readers = self._executor(queue_depth, "read")
        self._writer = self._executor(min(queue_depth, 1), "write")

    @property
    def readers(self) -> Executor | None:
        """Threads for a disk store's reads, None where there are none."""
        return self._readers

    @property
    def writer(self) -> Executor | None:
        """One thread for a disk store's writes, which keeps them in order."""
        return self._writer

    def fetch(self, store: Store, slots: Tensor, entries: int) -> Transfer:
        """Start to move the slots ``(B, H_kv, n)``, of which ``entries`` are real ones."""
        return self._start(lambda: store.start_read(slots), entries * store.entry_bytes)

    def fetch_all(self, store: Store) -> Transfer:
        """Start to move everything a store holds."""
        entries = store.rows * store.heads * store.length
        return self._start(store.start_read_all, entries * store.entry_bytes)

    def sent(self, nbytes: int) -> None:
        """Account for bytes written from the device to a home; they occupy the link, unwaited."""
        self.statistics.bytes_up += nbytes
        if self.pace is not None:
            self.pace.book(nbytes)

    def close(self) -> None:
        """End the threads, after what they are doing; may be called twice."""
        for executor in (self._readers, self._writer):
            if executor is not None:
                executor.shutdown(wait=True, cancel_futures=True)

    def _start(self, read: Callable[[], PendingRead], nbytes: int) -> Transfer:
        self.statistics.bytes_down += nbytes
        self.statistics.transfers += 1
        started = time.perf_counter()
        over = None if self.pace is None else self.pace.book(nbytes)
        pending = read()
        # what the caller's own thread does for a transfer keeps the computation waiting too
        self.statistics.wait_seconds += time.perf_counter() - started
        return _HostTransfer(self, pending, started, over)

    def arrive(self, pending: PendingRead, started: float, over: float | None) -> Tensor:
        """Wait for one transfer and account for it."""
        asked = time.perf_counter()
        entries = pending.wait()
        if self.pace is not None and over is not None:
            self.pace.wait_until(over)
        now = time.perf_counter()
        self.statistics.wait_seconds += now - asked
        self.statistics.transfer_seconds += (now if over is None else over) - started
        return entries

    @staticmethod
    def _executor(threads: int, name: str) -> ThreadPoolExecutor | None:
        if threads == 0:
            return None
        return ThreadPoolExecutor(threads, thread_name_prefix=f"infinigen-kv-{name}")


@dataclass(frozen=True, slots=True)
class _HostTransfer:
    link: Link
    pending: PendingRead
    started: float
    over: float | None

    def wait(self) -> Tensor:
        return self.link.arrive(self.pending, self.started, self.over)
