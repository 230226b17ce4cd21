"""Reads and writes that run on an executor's threads while the computation goes on.

The executors are the link's: nothing here starts a thread. Without one the work is done at once,
which gives the synchronous twin. Work is handed over through `Executor.submit` and taken back
through `Future.exception`; both order the memory of the two threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Executor, Future
from contextlib import suppress
from typing import Any

from torch import Tensor

from infinigen_kv.errors import HomeError


def settle(futures: Iterable[Future[None]]) -> BaseException | None:
    """Wait for all; what the first of those that failed raised."""
    failure: BaseException | None = None
    for future in futures:
        with suppress(CancelledError):
            raised = future.exception()  # waits, also after an earlier one has failed
            failure = failure or raised
    return failure


PIECES_PER_TASK = 16
BYTES_PER_TASK = 512 * 1024


class Batch:
    """Pieces of one read, of ``nbytes`` together, that up to ``depth`` tasks take from one list."""

    def __init__(
        self,
        work: Callable[..., None],
        pieces: Iterable[tuple[Any, ...]],
        executor: Executor | None,
        depth: int,
        nbytes: int = 0,
    ) -> None:
        self._work = work
        self._pieces = deque(pieces)
        self.futures: list[Future[None]] = []
        if executor is None:
            self._run()
            return
        # a thread that is woken for a single small piece costs more than the piece
        tasks = max(-(-len(self._pieces) // PIECES_PER_TASK), nbytes // BYTES_PER_TASK)
        for _ in range(min(depth, len(self._pieces), tasks)):
            self.futures.append(executor.submit(self._run))

    def wait(self) -> None:
        """Until all is done; raises what a piece raised once no task is left running."""
        try:
            self._run()  # whoever waits has nothing better to do
        finally:
            failure = settle(self.futures)
        if failure is not None:
            raise failure

    def _run(self) -> None:
        try:
            while True:
                try:
                    piece = self._pieces.popleft()
                except IndexError:
                    return
                self._work(*piece)
        except BaseException:
            self._pieces.clear()  # the read has failed: the rest would be in vain
            raise


class DiskRead:
    """Entries on their way from the disk."""

    def __init__(self, batch: Batch, finish: Callable[[], Tensor]) -> None:
        self._batch = batch
        self._finish = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """The entries, ``(B, H_kv, n, E)`` uint8; the same tensor at each call.

        Raises
        ------
        HomeError
            The disk returned less than was written or an error; no read of this is left running.
        """
        if self._result is None:
            self._batch.wait()
            self._result = self._finish()
        return self._result


class WriteBehind:
    """Writes that run behind the computation, in no particular order.

    A failed write makes the file useless: the first failure is raised at each later call.

    Parameters
    ----------
    executor
        Runs them; None writes at once.
    limit
        Bytes that may wait in memory; `submit` blocks while there would be more.
    """

    def __init__(self, executor: Executor | None, limit: int) -> None:
        self._executor = executor
        self._limit = limit
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._failure: BaseException | None = None

    @property
    def waiting(self) -> int:
        """Bytes handed over and not known to be written."""
        return sum(nbytes for _, nbytes in self._pending)

    def submit(self, nbytes: int, work: Callable[..., None], *given: Any) -> list[Future[None]]:
        """Write ``nbytes`` by calling ``work(*given)``; the future to await, if there is one."""
        while self._pending and self.waiting + nbytes > self._limit:
            self._retire()
        self.check()
        if self._executor is None:
            work(*given)
            return []
        future = self._executor.submit(work, *given)
        self._pending.append((future, nbytes))
        return [future]

    def settle(self, futures: Iterable[Future[None]]) -> None:
        """Wait for some of the writes and raise what went wrong."""
        failure = settle(futures)
        self._failure = self._failure or failure
        self.check()

    def check(self) -> None:
        """Raise what went wrong in a write that is over."""
        while self._pending and self._pending[0][0].done():
            self._retire()
        if isinstance(self._failure, HomeError):
            raise HomeError(str(self._failure)) from self._failure
        if self._failure is not None:
            raise self._failure

    def flush(self) -> None:
        """Wait for all writes and raise what went wrong."""
        while self._pending:
            self._retire()
        self.check()

    def stop(self) -> None:
        """Drop the writes that have not begun and wait for the others; raises nothing."""
        for future, _ in self._pending:
            future.cancel()
        while self._pending:
            self._retire()

    def _retire(self) -> None:
        future, _ = self._pending.popleft()
        self._failure = self._failure or settle([future])
