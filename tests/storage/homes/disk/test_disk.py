"""The disk store against the store in memory, and under faults of the disk."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from infinigen_kv.errors import HomeError
from infinigen_kv.storage.homes.disk.file import DiskFile
from infinigen_kv.storage.homes.disk.jobs import DiskRead
from infinigen_kv.storage.homes.disk.layout import BLOCK
from infinigen_kv.storage.homes.disk.store import DiskStore
from infinigen_kv.storage.homes.store import RamStore
from waiting import PATIENCE

THREADS = 3


def entries(rows: int, heads: int, tokens: int, entry_bytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = rows, heads, tokens, entry_bytes
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def some_slots(store: RamStore | DiskStore, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = store.rows, store.heads, count
    return torch.randint(0, store.length, shape, generator=generator)


class StoreMachine(RuleBasedStateMachine):
    """Random operations on both stores, of a size that `initialize` draws."""

    @initialize(
        heads=st.integers(1, 3),
        entry_bytes=st.sampled_from([24, 100, 352, 704, 768, 1400, 4096]),
        rows=st.integers(1, 3),
        threads=st.booleans(),
        gap=st.integers(0, 4),
    )
    def open(self, heads: int, entry_bytes: int, rows: int, threads: bool, gap: int) -> None:
        self.pool = ThreadPoolExecutor(THREADS) if threads else None
        self.folder = tempfile.TemporaryDirectory()
        self.file = DiskFile(
            self.folder.name, readers=self.pool, writers=self.pool, depth=2, gap=gap
        )
        # A second layer, so that extents of this one do not lie side by side.
        self.other = DiskStore(self.file, 1, heads, entry_bytes)
        self.disk = DiskStore(self.file, rows, heads, entry_bytes)
        self.ram = RamStore(rows, heads, entry_bytes)
        self.pending: list[tuple[DiskRead, Tensor]] = []
        self.seed = 0

    def new(self, rows: int, tokens: int) -> Tensor:
        self.seed += 1
        return entries(rows, self.ram.heads, tokens, self.ram.entry_bytes, self.seed)

    @rule(count=st.sampled_from([0, 1, 1, 2, 3, 7, 40, 150, 400]))
    def append(self, count: int) -> None:
        given = self.new(self.ram.rows, count)
        for store in (self.disk, self.ram):
            store.append(given)
        given.zero_()  # the stores have their own copy
        self.other.append(self.new(1, count))

    @precondition(lambda self: self.ram.length > 0)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, min(5, self.ram.length)))
        place = st.integers(0, self.ram.length - 1)
        rows = [
            data.draw(st.lists(place, min_size=count, max_size=count, unique=True))
            for _ in range(self.ram.rows)
        ]
        slots = torch.tensor(rows, dtype=torch.long).view(self.ram.rows, count)
        slots[:, :1] = torch.where(slots[:, :1] % 3 == 0, -1, slots[:, :1])
        given = self.new(self.ram.rows, count)
        for store in (self.disk, self.ram):
            store.write(slots, given)

    @rule(part=st.floats(0, 1.1))
    def truncate(self, part: float) -> None:
        length = int(part * self.ram.length)
        for store in (self.disk, self.ram):
            store.truncate(length)

    @rule(data=st.data())
    def take_rows(self, data: st.DataObject) -> None:
        place = st.integers(0, self.ram.rows - 1)
        index = torch.tensor(data.draw(st.lists(place, min_size=1, max_size=3)))
        for store in (self.disk, self.ram):
            store.take_rows(index)

    @precondition(lambda self: self.ram.length > 0)
    @rule(count=st.integers(0, 20), transposed=st.booleans())
    def start_read(self, count: int, transposed: bool) -> None:
        slots = some_slots(self.ram, count, self.seed)
        expected = self.ram.read(slots)
        given = slots.mT.contiguous().mT if transposed else slots  # any memory layout
        self.pending.append((self.disk.start_read(given), expected))

    @rule()
    def start_read_all(self) -> None:
        self.pending.append((self.disk.start_read_all(), self.ram.read_all().clone()))

    @rule()
    def wait(self) -> None:
        for pending, expected in self.pending:
            found = pending.wait()
            assert found.dtype == torch.uint8
            assert torch.equal(found, expected)
        self.pending = []

    @rule()
    def flush(self) -> None:
        self.disk.flush()

    @invariant()
    def same_size(self) -> None:
        assert self.disk.rows == self.ram.rows
        assert self.disk.length == self.ram.length

    def teardown(self) -> None:
        if not hasattr(self, "disk"):
            return
        assert torch.equal(self.disk.read_all(), self.ram.read_all())
        self.wait()
        for store in (self.disk, self.other, self.disk):
            store.close()
        # Whatever was copied and released, each extent is free exactly once.
        size = self.disk.layout.extent_bytes
        assert self.file.allocate(size, self.file.nbytes // size).tolist() == list(
            range(0, self.file.nbytes, size)
        )
        self.file.close()
        self.folder.cleanup()
        if self.pool:
            self.pool.shutdown()


StoreMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
TestStore = StoreMachine.TestCase


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(THREADS) as pool:
        yield pool


@pytest.fixture
def file(tmp_path: Path, pool: ThreadPoolExecutor) -> Iterator[DiskFile]:
    with DiskFile(tmp_path, readers=pool, writers=pool, depth=2, gap=0) as file:
        yield file
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("entry_bytes", [24, 100, 256, 768])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_every_token_by_itself(file: DiskFile, heads: int, entry_bytes: int) -> None:
    store = DiskStore(file, 2, heads, entry_bytes)
    content = entries(2, heads, 2 * store.layout.group_tokens + 1, entry_bytes)
    store.append(content)
    for token in range(store.length):
        found = store.read(torch.full((2, heads, 1), token))
        assert torch.equal(found, content[:, :, token : token + 1])


def test_one_token_at_a_time_equals_all_at_once(file: DiskFile) -> None:
    content = entries(2, 3, 200, 256)
    store = DiskStore(file, 2, 3, 256)
    for token in range(200):
        store.append(content[:, :, token : token + 1])
    assert torch.equal(store.read_all(), content)


def test_a_long_append_is_written_in_stages(
    file: DiskFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinigen_kv.storage.homes.disk.store.STAGE", 4 * BLOCK)
    store = DiskStore(file, 2, 2, 1024)  # two tokens to a block, so four a stage
    content = entries(2, 2, 301, 1024)
    store.append(content[:, :, :3])
    store.append(content[:, :, 3:])
    assert torch.equal(store.read_all(), content)


@pytest.mark.parametrize(
    ("gap", "reads", "blocks"), [(0, 3, 6), (6, 3, 6), (7, 2, 13), (99, 1, 41)]
)
def test_neighbours_share_a_read(
    file: DiskFile, monkeypatch: pytest.MonkeyPatch, gap: int, reads: int, blocks: int
) -> None:
    store = DiskStore(file, 1, 2, 2048)  # a token is a block
    content = entries(1, 2, 60, 2048)
    store.append(content)
    file.gap = gap
    calls = count_reads(monkeypatch)
    slots = torch.tensor([[[40, 1, 0, 10], [11, 2, 1, 10]]])
    found = store.read(slots)
    assert torch.equal(found, content.gather(2, slots[..., None].expand(-1, -1, -1, 2048)))
    assert len(calls) == store.reads == reads
    assert sum(calls) == store.bytes_read == blocks * BLOCK


def test_long_reads_are_shared_out(file: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinigen_kv.storage.homes.disk.store.LONGEST", 8 * BLOCK)
    store = DiskStore(file, 1, 1, 4096)
    store.append(entries(1, 1, 60, 4096))
    calls = count_reads(monkeypatch)
    store.read(torch.arange(20)[None, None])
    assert sorted(calls) == [4 * BLOCK, 8 * BLOCK, 8 * BLOCK]


def test_the_tail_is_read_from_memory(file: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(file, 1, 3, 256)  # five tokens to a block
    store.append(entries(1, 3, 14, 256))
    calls = count_reads(monkeypatch)
    store.read(torch.tensor([10, 13]).expand(1, 3, 2))
    assert calls == []
    store.append(entries(1, 3, 1, 256))
    store.read(torch.tensor([10, 13]).expand(1, 3, 2))
    assert calls == [BLOCK]


def test_only_repeated_rows_are_copied(file: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(file, 3, 1, 4096)
    content = entries(3, 1, 5, 4096)
    store.append(content)
    reserved = file.nbytes
    calls = count_reads(monkeypatch)
    store.take_rows(torch.tensor([2, 0, 1]))
    assert calls == []
    store.take_rows(torch.tensor([1, 1, 2]))
    assert calls == [5 * BLOCK]
    assert file.nbytes == reserved
    assert torch.equal(store.read_all(), content[[0, 0, 1]])


def test_slots_that_are_not_in_use_are_refused(file: DiskFile) -> None:
    store = DiskStore(file, 2, 1, 64)
    store.append(entries(2, 1, 3, 64))
    for slot in (-1, 3):
        with pytest.raises(IndexError, match="3 in use"):
            store.read(torch.tensor([[[0]], [[slot]]]))
    for slot in (-2, 3):
        with pytest.raises(IndexError, match="3 in use"):
            store.write(torch.tensor([[0], [slot]]), entries(2, 1, 1, 64))
    store.write(torch.empty(2, 0, dtype=torch.long), entries(2, 1, 0, 64))


def test_bytes_are_those_reserved(file: DiskFile) -> None:
    store = DiskStore(file, 2, 1, 4096, capacity=65)
    assert store.nbytes == file.nbytes == 2 * 2 * 64 * BLOCK
    store.append(entries(2, 1, 65, 4096))
    assert store.nbytes == file.nbytes
    store.close()
    assert store.nbytes == 0
    DiskStore(file, 1, 1, 4096, capacity=256)
    assert file.nbytes == 2 * 2 * 64 * BLOCK


def test_writes_run_behind_and_wait_for_memory(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, plain = threading.Event(), os.pwritev

    def gated(fd: int, buffers: list[memoryview], offset: int) -> int:
        assert gate.wait(PATIENCE)
        return plain(fd, buffers, offset)

    content = entries(1, 1, 9, 4096)
    with DiskFile(tmp_path, readers=pool, writers=pool, write_behind=4 * BLOCK) as file:
        store = DiskStore(file, 1, 1, 4096)
        monkeypatch.setattr(os, "pwritev", gated)
        for token in range(4):
            store.append(content[:, :, token : token + 1])
        assert file.writes.waiting == 4 * BLOCK
        threading.Timer(0.1, gate.set).start()
        for token in range(4, 9):
            store.append(content[:, :, token : token + 1])
            assert gate.is_set()
            assert file.writes.waiting <= 4 * BLOCK
        assert torch.equal(store.read_all(), content)
        assert file.writes.waiting == 0


def delay_first(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The next read or write takes long, the others overtake it if they may."""
    plain, calls = getattr(os, name), []

    def delayed(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            time.sleep(0.1)
        return int(plain(fd, buffers, offset))

    monkeypatch.setattr(os, name, delayed)


def test_a_read_in_flight_sees_nothing_of_later_writes(
    file: DiskFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(file, 1, 1, 4096)
    old, new = entries(1, 1, 3, 4096, 1), entries(1, 1, 3, 4096, 2)
    for change in (
        lambda: store.write(torch.arange(3)[None], new),
        lambda: (store.truncate(0), store.append(new)),
    ):
        store.truncate(0)
        store.append(old)
        store.flush()
        with monkeypatch.context() as patch:
            delay_first(patch, "preadv")
            # One read for all three: the thread that waits has nothing left to do.
            pending = store.start_read(torch.arange(3)[None, None])
            change()
            file.flush()
            assert torch.equal(pending.wait(), old)
        assert torch.equal(store.read_all(), new)


def test_writes_to_one_place_keep_their_order(
    file: DiskFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(file, 1, 1, 4096)
    old, new = entries(1, 1, 3, 4096, 1), entries(1, 1, 3, 4096, 2)
    slots = torch.arange(3)[None]
    for first, second in (
        (lambda: store.append(old), lambda: store.write(slots, new)),
        (lambda: store.write(slots, old), lambda: store.write(slots, new)),
        (lambda: store.write(slots, old), lambda: (store.truncate(0), store.append(new))),
    ):
        with monkeypatch.context() as patch:
            delay_first(patch, "pwritev")
            first()
            second()
            assert torch.equal(store.read_all(), new)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each positional read from now on."""
    calls: list[int] = []
    plain = os.preadv

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(sum(len(buffer) for buffer in buffers))
        return plain(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    return calls


class Fault:
    """Stands in for `os.preadv` or `os.pwritev`, and fails at one call of several."""

    def __init__(self, name: str, kind: int | None, at: int = 2) -> None:
        self.plain = getattr(os, name)
        self.kind = kind
        self.at = at
        self.calls = self.running = 0
        self.lock = threading.Lock()

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        with self.lock:
            self.running += 1
            self.calls += 1
            fails = self.calls == self.at
        time.sleep(0.001 if fails else 0.01)  # the others are still running when it fails
        try:
            if not fails:
                return int(self.plain(fd, buffers, offset))
            if self.kind is None:
                return len(buffers[0]) - 512
            raise OSError(self.kind, os.strerror(self.kind))
        finally:
            with self.lock:
                self.running -= 1


READ_FAULTS = pytest.mark.parametrize(
    ("kind", "message"),
    [
        (None, "returned 3584 bytes of 4096: check the disk"),
        (errno.EIO, r"cannot read 4096 bytes \(Input/output error\): check the disk"),
    ],
)


@READ_FAULTS
def test_a_failed_read(
    file: DiskFile, monkeypatch: pytest.MonkeyPatch, kind: int | None, message: str
) -> None:
    store = DiskStore(file, 1, 1, 4096)
    content = entries(1, 1, 60, 4096)
    store.append(content)
    store.flush()
    slots = torch.arange(0, 60, 2)[None, None]
    fault = Fault("preadv", kind)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fault)
        pending = store.start_read(slots)
        with pytest.raises(HomeError, match=message) as raised:
            pending.wait()
        assert fault.running == 0
    assert str(file.directory) in str(raised.value)
    assert "infinigen-kv-" not in str(raised.value)
    assert torch.equal(store.read(slots), content[:, :, ::2])


def test_after_a_failed_read_the_rest_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pieces are left to whoever waits, so that nobody else begins one meanwhile."""
    gate = threading.Event()
    with ThreadPoolExecutor(1) as busy, DiskFile(tmp_path, readers=busy, gap=0) as file:
        store = DiskStore(file, 1, 1, 4096)
        store.append(entries(1, 1, 60, 4096))
        fault = Fault("preadv", errno.EIO)
        monkeypatch.setattr(os, "preadv", fault)
        busy.submit(gate.wait, PATIENCE)
        pending = store.start_read(torch.arange(0, 60, 2)[None, None])
        busy.shutdown(wait=False, cancel_futures=True)
        with pytest.raises(HomeError, match="cannot read"):
            pending.wait()
        gate.set()
    assert fault.calls == 2  # of 30


@pytest.mark.parametrize("threads", [False, True])
def test_a_failed_read_of_all(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, threads: bool
) -> None:
    with DiskFile(tmp_path, readers=pool if threads else None) as file:
        store = DiskStore(file, 2, 1, 4096)
        store.append(entries(2, 1, 100, 4096))
        fault = Fault("preadv", errno.EIO, at=3)
        monkeypatch.setattr(os, "preadv", fault)
        with pytest.raises(HomeError, match="cannot read"):
            store.read_all()
        assert fault.running == 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (None, "took 3584 bytes of 4096"),
        (errno.EIO, "cannot write 4096 bytes"),
        (errno.ENOSPC, r"needs 4096 bytes more .* \d+ bytes are free .* codec='int4'"),
    ],
)
def test_a_failed_write_behind_the_computation(
    file: DiskFile, monkeypatch: pytest.MonkeyPatch, kind: int | None, message: str
) -> None:
    store, other = DiskStore(file, 1, 1, 4096), DiskStore(file, 1, 1, 4096)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", Fault("pwritev", kind, at=1))
        store.append(entries(1, 1, 1, 4096))
        with pytest.raises(HomeError, match=message):
            file.flush()
    for use in (
        lambda: store.append(entries(1, 1, 1, 4096)),
        lambda: store.read(torch.zeros(1, 1, 1, dtype=torch.long)),
        lambda: other.append(entries(1, 1, 1, 4096)),
        store.read_all,
        store.flush,
        file.flush,
    ):
        with pytest.raises(HomeError, match=message):
            use()
    store.close()
    other.close()


def test_a_read_reports_the_failed_write_of_its_store(
    file: DiskFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(file, 1, 1, 4096)
    monkeypatch.setattr(os, "pwritev", Fault("pwritev", errno.EIO, at=3))
    for token in range(4):
        store.append(entries(1, 1, 1, 4096, token))
    with pytest.raises(HomeError, match="cannot write"):
        store.read_all()


def test_a_failed_write_at_once_leaves_the_store_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskFile(tmp_path) as file:
        store = DiskStore(file, 1, 3, 256)
        content = entries(1, 3, 23, 256)
        store.append(content[:, :, :3])
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", Fault("pwritev", errno.ENOSPC))
            with pytest.raises(HomeError, match="needs"):
                store.append(content[:, :, 3:])
        assert store.length == 3
        store.append(content[:, :, 3:])
        assert torch.equal(store.read_all(), content)


def test_a_full_disk_is_found_before_anything_is_written(
    file: DiskFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(file, 1, 1, 4096)
    content = entries(1, 1, 70, 4096)
    store.append(content[:, :, :10])

    def full(fd: int, offset: int, count: int) -> None:
        os.ftruncate(fd, offset + count // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(HomeError, match=f"needs {64 * BLOCK} bytes more than the"):
            store.append(content[:, :, 10:])
    assert store.length == 10
    store.append(content[:, :, 10:])
    assert torch.equal(store.read_all(), content)


def test_closing_in_the_middle_of_everything(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate, over = threading.Semaphore(0), threading.Event(), list[int]()
    plain = os.preadv

    def gated(fd: int, buffers: list[memoryview], offset: int) -> int:
        begun.release()
        assert gate.wait(PATIENCE)
        over.append(offset)
        return plain(fd, buffers, offset)

    with DiskFile(tmp_path, readers=pool, writers=pool, gap=0) as file:
        store = DiskStore(file, 1, 1, 4096)
        store.append(entries(1, 1, 60, 4096))
        store.flush()
        monkeypatch.setattr(os, "preadv", gated)
        pending = [store.start_read(torch.arange(0, 60, 2)[None, None]) for _ in range(3)]
        store.append(entries(1, 1, 60, 4096))
        for _ in range(THREADS):
            assert begun.acquire(timeout=PATIENCE)
        # two tasks for each read: what is under way ends once the last one is cancelled
        pending[-1]._batch.futures[-1].add_done_callback(lambda future: gate.set())
    assert len(over) == 2 * 30
    with pytest.raises(HomeError, match="is closed"):
        pending[-1].wait()
    store.close()
    with pytest.raises(HomeError, match="is closed"):
        store.append(entries(1, 1, 1, 4096))
