"""Batches and writes behind: nothing is left running, nothing is left out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest

from infinigen_kv.errors import HomeError
from infinigen_kv.storage.homes.disk.jobs import (
    BYTES_PER_TASK,
    PIECES_PER_TASK,
    Batch,
    WriteBehind,
    settle,
)
from waiting import PATIENCE


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def fail(text: str) -> None:
    raise HomeError(text)


def test_settling_waits_for_all_and_tells_the_first_failure(pool: ThreadPoolExecutor) -> None:
    futures = [pool.submit(fail, "first"), pool.submit(time.sleep, 0.05), pool.submit(fail, "last")]
    assert str(settle(futures)) == "first"
    assert all(future.done() for future in futures)
    assert settle([]) is None


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_a_batch_does_each_piece_once(pool: ThreadPoolExecutor, depth: int) -> None:
    done: list[int] = []
    batch = Batch(done.append, [(number,) for number in range(50)], pool, depth)
    assert len(batch.futures) == min(depth, -(-50 // PIECES_PER_TASK))  # few small pieces each
    batch.wait()
    assert sorted(done) == list(range(50))


def test_no_more_tasks_than_pieces(pool: ThreadPoolExecutor) -> None:
    batch = Batch(lambda piece: None, [(1,), (2,)], pool, depth=9, nbytes=8 * BYTES_PER_TASK)
    assert len(batch.futures) == 2


def test_many_bytes_are_worth_more_tasks(pool: ThreadPoolExecutor) -> None:
    for nbytes, tasks in ((BYTES_PER_TASK, 1), (3 * BYTES_PER_TASK, 3), (6 * BYTES_PER_TASK, 4)):
        batch = Batch(lambda piece: None, [(1,)] * 6, pool, depth=4, nbytes=nbytes)
        assert len(batch.futures) == tasks


def test_whoever_waits_helps() -> None:
    """Also when the executor has dropped the tasks, or is busy with something that never ends."""
    gate, done = threading.Event(), list[int]()
    with ThreadPoolExecutor(1) as busy:
        busy.submit(gate.wait, PATIENCE)
        batch = Batch(done.append, [(1,), (2,)], busy, depth=2)
        busy.shutdown(wait=False, cancel_futures=True)
        batch.wait()
        gate.set()
    assert done == [1, 2]


def fails_at_second(begun: list[int], piece: int) -> None:
    begun.append(piece)
    if piece == 1:
        raise HomeError("broken")


def test_a_task_that_fails_leaves_the_rest() -> None:
    begun: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        batch = Batch(fails_at_second, [(begun, piece) for piece in range(50)], pool, depth=1)
        assert settle(batch.futures) is not None
        with pytest.raises(HomeError, match="broken"):
            batch.wait()
    assert begun == [0, 1]


def test_whoever_waits_and_fails_leaves_the_rest() -> None:
    gate, begun = threading.Event(), list[int]()
    with ThreadPoolExecutor(1) as busy:
        busy.submit(gate.wait, PATIENCE)
        batch = Batch(fails_at_second, [(begun, piece) for piece in range(50)], busy, depth=1)
        busy.shutdown(wait=False, cancel_futures=True)
        with pytest.raises(HomeError, match="broken"):
            batch.wait()
        gate.set()
    assert begun == [0, 1]


def test_without_an_executor_the_work_is_done_at_once() -> None:
    done: list[int] = []
    Batch(done.append, [(1,)], None, depth=4)
    WriteBehind(None, limit=0).submit(8, done.append, 2)
    assert done == [1, 2]


@pytest.mark.parametrize("threads", [False, True])
def test_the_first_failed_write_is_raised_from_then_on(
    pool: ThreadPoolExecutor, threads: bool
) -> None:
    executor: Executor | None = pool if threads else None
    writes = WriteBehind(executor, limit=100)
    if threads:
        writes.submit(8, fail, "full")
        with pytest.raises(HomeError, match="full"):
            writes.flush()
        for use in (writes.check, writes.flush, lambda: writes.submit(8, fail, "other")):
            with pytest.raises(HomeError, match="full"):
                use()
    else:
        with pytest.raises(HomeError, match="full"):
            writes.submit(8, fail, "full")
        writes.check()  # the caller knows already, and its state is as before


def test_stopping_drops_what_has_not_begun(pool: ThreadPoolExecutor) -> None:
    begun, gate, done = threading.Barrier(3), threading.Event(), []

    def work(number: int) -> None:
        begun.wait(PATIENCE)
        assert gate.wait(PATIENCE)
        done.append(number)

    writes = WriteBehind(pool, limit=100)
    for number in range(2):
        writes.submit(1, work, number)
    (last,) = writes.submit(1, done.append, 2)
    last.add_done_callback(lambda future: gate.set())  # cancelled, or stopping never ends
    begun.wait(PATIENCE)
    writes.stop()
    assert last.cancelled()
    assert sorted(done) == [0, 1]
    assert writes.waiting == 0
