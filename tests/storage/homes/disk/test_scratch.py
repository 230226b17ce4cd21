"""The life of scratch files: names, leftovers, ends, O_DIRECT."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from infinigen_kv.errors import HomeError, InputError
from infinigen_kv.storage.homes.disk import scratch
from infinigen_kv.storage.homes.disk.file import DiskFile
from infinigen_kv.storage.homes.disk.layout import BLOCK
from linking import open_files

CHILD = """
import sys, time
from infinigen_kv.storage.homes.disk.file import DiskFile
plain = DiskFile(sys.argv[1])
named = DiskFile(sys.argv[2], named=True)
for file in plain, named:
    file.allocate(4096, 4)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    plain, named = tmp_path / "plain", tmp_path / "named"
    plain.mkdir()
    named.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, plain, named], stdout=subprocess.PIPE, text=True
    )
    with child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            assert list(plain.iterdir()) == []
            (path,) = named.iterdir()
            assert path.name.startswith(f"infinigen-kv-{child.pid}-")
            with DiskFile(named):
                assert path.exists(), "a living process's file was removed"
        finally:
            child.send_signal(number)
    assert child.returncode == -number
    assert path.exists()  # where a name must be kept, the next start cleans up
    other = named / "infinigen-kv.txt"
    other.touch()
    with DiskFile(named):
        assert list(named.iterdir()) == [other]


def test_a_file_has_no_name_while_it_is_open(tmp_path: Path) -> None:
    before = open_files()
    with DiskFile(tmp_path) as file:
        assert list(tmp_path.iterdir()) == []
        assert file.path is None
        assert not file.closed
    assert file.closed
    file.close()
    assert open_files() <= before


def test_a_kept_name_is_private_and_goes_at_the_end(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, named=True)
    assert file.path is not None
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    with DiskFile(tmp_path):
        assert file.path.exists()  # live, though in the same process
    with pytest.raises(ZeroDivisionError), file:
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_forgotten_file_is_removed(tmp_path: Path) -> None:
    before = open_files()
    file = DiskFile(tmp_path, named=True)
    del file
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert open_files() <= before


def test_a_file_that_cannot_be_unlinked_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EBUSY, "busy")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        file = DiskFile(tmp_path)
    assert file.path is not None and file.path.exists()
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_new_file_that_is_taken_for_a_leftover_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, calls = fcntl.flock, []

    def taken_at_first(fd: int, operation: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            scratch_file = next(tmp_path.iterdir())
            scratch_file.unlink()
            raise BlockingIOError
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", taken_at_first)
    before = open_files()
    with DiskFile(tmp_path, named=True) as file:
        assert len(calls) == 2
        assert list(tmp_path.iterdir()) == [file.path]
    assert open_files() <= before


def test_only_regular_files_of_ours_are_leftovers(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.touch()
    link = tmp_path / "infinigen-kv-1-a.kv"
    link.symlink_to(precious)
    folder = tmp_path / "infinigen-kv-2-b.kv"
    folder.mkdir()
    leftover = tmp_path / "infinigen-kv-3-c.kv"
    leftover.touch()
    assert scratch.remove_leftovers(tmp_path) == [leftover]
    assert sorted(tmp_path.iterdir()) == [link, folder, precious]


def test_a_directory_that_cannot_be_used_is_an_input_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"home_dir='.*nowhere' is not valid: .* cannot be used"):
        DiskFile(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is not a directory"):
        DiskFile(tmp_path / "file")
    with pytest.raises(InputError, match="null"):
        DiskFile("a\0b")

    def read_only(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(InputError, match=r"can be written to \(Read-only file system\)"):
        DiskFile(tmp_path)


def test_the_temporary_directory_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with DiskFile() as file:
        assert file.directory == tmp_path


def refuse_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fcntl.fcntl

    def refusing(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(fd, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refusing)


def refuse_first_read(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.preadv

    def refusing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)


@pytest.mark.parametrize("refuse", [refuse_flag, refuse_first_read])
def test_a_file_system_without_direct_reads_is_read_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: object
) -> None:
    assert callable(refuse)
    refuse(monkeypatch)
    with DiskFile(tmp_path) as file:
        assert not file.direct
        round_trip(file)


def test_a_file_in_memory_works(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("no file system in memory")
    with DiskFile(shared) as file:
        round_trip(file)


def round_trip(file: DiskFile) -> None:
    first, second = file.allocate(2 * BLOCK, 2).tolist()
    content = scratch.aligned(2 * BLOCK)
    content[...] = np.random.default_rng(0).integers(0, 256, 2 * BLOCK)
    file.write(content, second)
    file.write(content[::-1].copy() if not file.direct else content, first)
    found = scratch.aligned(2 * BLOCK)
    file.read(found, second)
    assert np.array_equal(found, content)


def test_a_failing_disk_at_the_start_is_a_home_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = open_files()
    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(HomeError, match="cannot write 4096 bytes"):
        DiskFile(tmp_path)
    assert open_files() <= before
    assert list(tmp_path.iterdir()) == []


def test_space_is_reused(tmp_path: Path) -> None:
    with DiskFile(tmp_path) as file:
        extents = file.allocate(BLOCK, 3)
        assert extents.tolist() == [0, BLOCK, 2 * BLOCK]
        file.free(BLOCK, extents[1:])
        assert file.allocate(2 * BLOCK, 1).tolist() == [3 * BLOCK]
        assert file.allocate(BLOCK, 3).tolist() == [BLOCK, 2 * BLOCK, 5 * BLOCK]
        assert file.nbytes == 6 * BLOCK


def test_a_closed_file_says_so(tmp_path: Path) -> None:
    file = DiskFile(tmp_path)
    file.allocate(BLOCK, 1)
    file.close()
    for use in (
        file.check,
        lambda: file.allocate(BLOCK, 1),
        lambda: file.read(scratch.aligned(BLOCK), 0),
        lambda: file.write(scratch.aligned(BLOCK), 0),
    ):
        with pytest.raises(HomeError, match="is closed: open a new one"):
            use()
