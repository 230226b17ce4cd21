"""The file of a disk home: its space, what is in flight, and its failures."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from infinigen_kv.errors import HomeError, InputError
from infinigen_kv.storage.homes.disk import scratch
from infinigen_kv.storage.homes.disk.jobs import Batch, WriteBehind, settle
from infinigen_kv.storage.homes.disk.layout import BLOCK, Bytes, Indices

WRITE_BEHIND = 64 * 1024 * 1024  # bytes
DEPTH = 16  # reads in flight at a time
# Measured on a virtual NVMe disk with 8000 tokens: a read of its own costs about 15 us, one more
# block in a longer read 2.5 us; 4 was the fastest or as fast as any at every share wanted.
GAP = 4
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFile:
    """Scratch space on disk for the layers of one cache. Mode 0600; gone when closed.

    One thread at a time may call it, but for `read` and `write`, which any may call.

    Parameters
    ----------
    directory
        Where the file lies; None: the temporary directory. (Where that one is in memory, a tmpfs,
        so is the home.)
    readers, writers
        Executors for reads and for writes behind the computation; they may be the same, and must
        outlive the file. None: the caller's thread does the work.
    depth
        Reads in flight at a time for one `DiskStore.start_read`.
    gap
        Blocks between two wanted ones that are read in vain to save a read.
    write_behind
        Bytes that may wait in memory to be written.
    named
        Keep the name while the file is open, as on a file system that cannot do otherwise.

    Raises
    ------
    InputError
        The directory is missing, not a directory, or cannot be written to; or this system has no
        POSIX files.
    HomeError
        The directory's file system is full or fails.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        readers: Executor | None = None,
        writers: Executor | None = None,
        depth: int = DEPTH,
        gap: int = GAP,
        write_behind: int = WRITE_BEHIND,
        named: bool = False,
    ) -> None:
        self.directory = scratch.existing(directory)
        self.readers = readers
        self.depth = depth
        self.gap = gap
        self.writes = WriteBehind(writers, write_behind)
        self.bytes_read = 0
        """Bytes that the stores' reads asked of the disk so far."""
        self._size = 0
        self._free: dict[int, list[int]] = {}
        self._reading: list[Future[None]] = []
        scratch.remove_leftovers(self.directory)
        self._fd, self.path = self._create(named)
        self._release = weakref.finalize(self, scratch.release, self._fd, self.path, os.getpid())
        try:
            self.direct = scratch.make_direct(self._fd)
        except OSError as error:
            self.close()
            raise self._failure("write", BLOCK, error) from error

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """Bytes reserved on the disk."""
        return self._size

    @property
    def closed(self) -> bool:
        """Nothing can be read or written any more."""
        return not self._release.alive

    def allocate(self, size: int, count: int) -> Indices:
        """Reserve ``count`` extents of ``size`` bytes; their starts ``(count,)``.

        New ones lie side by side, in this order.

        Raises
        ------
        HomeError
            The disk is full; nothing was reserved.
        """
        self.check()
        spare = self._free.get(size, [])
        missing = count - len(spare)
        if missing > 0:
            self._grow(missing * size)
            spare = spare + [self._size + place * size for place in range(missing)]
            self._size += missing * size
        self._free[size] = spare[count:]
        return np.array(spare[:count], dtype=np.int64)

    def free(self, size: int, extents: Indices) -> None:
        """Give back extents of ``size`` bytes for other layers to use."""
        self._free[size] = sorted(self._free.get(size, []) + extents.reshape(-1).tolist())

    def start(
        self, work: Callable[..., None], pieces: Sequence[tuple[Any, ...]], nbytes: int
    ) -> Batch:
        """Begin ``work(*piece)`` for each piece, of ``nbytes`` together, on the readers."""
        batch = Batch(work, pieces, self.readers, self.depth, nbytes)
        self._reading = [future for future in self._reading if not future.done()]
        self._reading += batch.futures
        return batch

    def read(self, into: Bytes, offset: int) -> None:
        """Fill ``into``, an aligned buffer of whole blocks, from ``offset`` on.

        Raises
        ------
        HomeError
            The disk failed, or returned less than was asked for.
        """
        try:
            count = os.preadv(self._fd, [into.data], offset)
        except OSError as error:
            raise self._failure("read", len(into), error) from error
        if count != len(into):
            raise HomeError(
                f"the disk home in {self.directory} returned {count} bytes of {len(into)}: "
                "check the disk, or choose another home_dir"
            )

    def write(self, content: Bytes, offset: int) -> None:
        """Write ``content``, an aligned buffer of whole blocks, at ``offset``.

        Raises
        ------
        HomeError
            The disk failed, is full, or took only a part.
        """
        try:
            count = os.pwritev(self._fd, [content.data], offset)
        except OSError as error:
            raise self._failure("write", len(content), error) from error
        if count != len(content):
            raise HomeError(
                f"the disk home in {self.directory} took {count} bytes of {len(content)}: "
                "check the disk and its free space, or choose another home_dir"
            )

    def check(self) -> None:
        """Raise `HomeError` if the file is closed or a write behind the computation failed."""
        if self.closed:
            raise self._failure("be used for", 0, OSError(errno.EBADF, ""))
        self.writes.check()

    def flush(self) -> None:
        """Wait for all writes behind the computation; raises `HomeError` if one failed."""
        self.writes.flush()

    def close(self) -> None:
        """Remove the file; may be called twice. Close the stores in it first."""
        self.writes.stop()
        for future in self._reading:
            future.cancel()
        settle(self._reading)
        self._release()
        self._fd = -1  # the number may soon be another file's

    def _grow(self, nbytes: int) -> None:
        try:
            scratch.lengthen(self._fd, self._size, nbytes)
        except OSError as error:
            failure = self._failure("reserve", nbytes, error)
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)  # a part may have been reserved
            raise failure from error

    def _create(self, named: bool) -> tuple[int, Path | None]:
        try:
            return scratch.create(self.directory, named)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise InputError(
                    f"home_dir={str(self.directory)!r} is not valid: it must be a directory that "
                    f"can be written to ({error.strerror})"
                ) from error
            raise self._failure("create", BLOCK, error) from error

    def _failure(self, verb: str, nbytes: int, error: OSError) -> HomeError:
        if error.errno == errno.EBADF:
            return HomeError(f"the disk home in {self.directory} is closed: open a new one")
        if error.errno not in _FULL:
            return HomeError(
                f"the disk home in {self.directory} cannot {verb} {nbytes} bytes "
                f"({error.strerror}): check the disk, or choose another home_dir"
            )
        try:
            free = f"{shutil.disk_usage(self.directory).free} bytes"
        except OSError:
            free = "an unknown number"
        return HomeError(
            f"the disk home in {self.directory} needs {nbytes} bytes more than the "
            f"{self._size} it has, and {free} are free ({error.strerror}): use a shorter prompt, "
            "a smaller batch or codec='int4', or choose another home_dir"
        )
