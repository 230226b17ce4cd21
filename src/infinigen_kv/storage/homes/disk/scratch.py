"""Scratch files: made without a name that outlives the process, read past the page cache.

The file loses its name as soon as it is open. The kernel then frees it when the process ends,
whatever the end is: an exception, SIGTERM or SIGKILL, and no signal handler is needed. Where a
file system refuses to unlink an open file it keeps its name, is removed when it is closed or at the
interpreter's exit, and otherwise by the next process that opens one in the same directory. A living
process holds a lock (flock) on its file, so a file of ours whose lock is free is a leftover.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
import tempfile
from pathlib import Path

import numpy as np

from infinigen_kv.errors import InputError
from infinigen_kv.storage.homes.disk.layout import BLOCK, Bytes

if sys.platform != "win32":
    import fcntl

PREFIX, SUFFIX = "infinigen-kv-", ".kv"
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


def aligned(nbytes: int) -> Bytes:
    """``nbytes`` of uninitialised memory at a multiple of `BLOCK`, as O_DIRECT wants it."""
    raw = np.empty(nbytes + BLOCK, dtype=np.uint8)
    skip = -raw.__array_interface__["data"][0] % BLOCK
    return raw[skip : skip + nbytes]


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove the files of processes that were killed; those that were removed."""
    removed = []
    for path in sorted(directory.glob(f"{PREFIX}*{SUFFIX}")):
        # Another user's file, one that has just gone, one whose lock is held: not ours to remove.
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(fd)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    removed.append(path)
            finally:
                os.close(fd)
    return removed


def existing(directory: str | os.PathLike[str] | None) -> Path:
    """The directory for scratch files, the temporary one by default; raises `InputError`."""
    if sys.platform == "win32":
        raise InputError(
            "home='disk' is not valid: it must be 'ram' where there are no POSIX files"
        )
    try:
        path = Path(tempfile.gettempdir() if directory is None else directory).absolute()
    except FileNotFoundError as error:
        raise InputError(
            f"home_dir=None is not valid: it must be a directory, as {error}"
        ) from error
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            return path
        fault = "is not a directory"
    except (OSError, ValueError) as error:  # ValueError: a null byte
        fault = f"cannot be used ({getattr(error, 'strerror', None) or error})"
    raise InputError(
        f"home_dir={str(path)!r} is not valid: it must be an existing directory, and this {fault}"
    )


def create(directory: Path, named: bool) -> tuple[int, Path | None]:
    """A new file, mode 0600: its descriptor, and the name that it keeps if it has to."""
    while True:
        created = _attempt(directory, named)
        if created is not None:
            return created


def _attempt(directory: Path, named: bool) -> tuple[int, Path | None] | None:
    path = directory / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}{SUFFIX}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    if not _lock(fd):
        os.close(fd)
        return None
    if not named:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            return fd, None
    return fd, path


def _lock(fd: int) -> bool:
    """Mark a new file as that of a living process; False if it is being removed as a leftover,
    which it looks like until it is locked.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks: a process that cleans up gets none either, and leaves it.
        return True
    return True


def make_direct(fd: int) -> bool:
    """Bypass the page cache where the file system lets a block be written and read that way."""
    flag = getattr(os, "O_DIRECT", 0)
    before = fcntl.fcntl(fd, fcntl.F_GETFL)
    block = aligned(BLOCK)
    block.fill(0)
    try:
        # Not at `open`: some file systems create the file and then refuse.
        fcntl.fcntl(fd, fcntl.F_SETFL, before | flag)
        os.pwritev(fd, [block.data], 0)
        os.preadv(fd, [block.data], 0)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, before)
        return False
    return bool(flag)


def lengthen(fd: int, size: int, nbytes: int) -> None:
    """Reserve space, where the system can; a full disk otherwise shows when it is written to."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, size, nbytes)
            return
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
    os.ftruncate(fd, size + nbytes)


def release(fd: int, path: Path | None, process: int) -> None:
    """Close a file and remove the name that it kept. ``process`` is the one that created it."""
    # A forked child that ends must leave its parent's name alone.
    if path is not None and os.getpid() == process:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    os.close(fd)
