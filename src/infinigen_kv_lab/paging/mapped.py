"""Entries in memory-mapped files, of which only so many pages are in memory at a time."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import numpy as np

from infinigen_kv.errors import HomeError, InputError
from infinigen_kv.storage.homes.disk import scratch
from infinigen_kv.storage.homes.disk.layout import BLOCK, Bytes, Indices
from infinigen_kv_lab.paging.page_table import Faults, Page, PageTable

PAGE = max(BLOCK, mmap.PAGESIZE)  # bytes
WINDOW = 16  # pages; at a fault the kernel maps this many where it has them in memory
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


class PagedMemory:
    """Areas that share a limit of pages in memory.

    A `PageTable` decides what leaves: the least recently used, as in an operating system. That page
    is unmapped (``madvise``) and, with ``cold``, dropped from the system's page cache as well
    (``posix_fadvise``), so that the next access has to read the file. What was just written leaves
    the cache once the system has brought it to the disk, by and by or at `settle`.

    Parameters
    ----------
    directory
        Where the files lie. Where it is in memory, a tmpfs, so are they.
    cold
        See above; without it the page cache stands for the home.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, *, cold: bool) -> None:
        self.directory = scratch.existing(directory)
        self.table = PageTable()
        self._cold = cold and hasattr(os, "posix_fadvise")
        self._areas: dict[int, MappedArea] = {}
        self._made = 0
        scratch.remove_leftovers(self.directory)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(area.nbytes for area in self._areas.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes of the pages in memory."""
        return len(self.table) * PAGE

    @property
    def faults(self) -> Faults:
        """Pages that moved since the last `Faults.take`."""
        return self.table.faults

    def area(self, lines: int, slots: int, entry_bytes: int) -> MappedArea:
        """A new, empty area of ``lines`` times ``slots`` entries.

        Raises
        ------
        InputError
            The directory cannot be written to.
        HomeError
            The disk is full or fails.
        """
        made = MappedArea(self, self._made, lines, slots, entry_bytes)
        self._areas[self._made] = made
        self._made += 1
        return made

    @contextmanager
    def using(
        self, area: int, pages: Iterable[int], *, write: bool, fresh: int | None
    ) -> Iterator[None]:
        """An access to pages of an area; what has to make room for them leaves memory after it."""
        leaving: dict[int, set[int]] = {}
        for page, _ in self.table.touch(area, pages, write=write, fresh=fresh):
            leaving.setdefault(page.area, set()).add(page.number)
        yield
        for number, gone in leaving.items():
            self._areas[number].unmap(gone, cold=self._cold)

    def settle(self) -> None:
        """Bring what was written to the disk, so that it can leave memory."""
        for area in self._areas.values() if self._cold else ():
            area.settle()

    def remove(self, area: MappedArea) -> None:
        """Give the file of an area back."""
        self.table.forget(area.number)
        del self._areas[area.number]
        area.close()

    def close(self) -> None:
        """Give all files back; may be called twice."""
        for area in list(self._areas.values()):
            self.remove(area)


class MappedArea:
    """Entries ``(lines, slots, E)`` in a private file that loses its name once it is open.

    Made by `PagedMemory.area`. Each line starts on a page of its own.
    """

    def __init__(
        self, memory: PagedMemory, number: int, lines: int, slots: int, entry_bytes: int
    ) -> None:
        self.number = number
        self.lines = lines
        self.slots = slots
        self.entry_bytes = entry_bytes
        self._memory = weakref.ref(memory)  # a cycle would keep the file until it is collected
        self._line_pages = max(1, -(-slots * entry_bytes // PAGE))
        self._fd = _create(memory.directory, self.nbytes)
        self._release = weakref.finalize(self, os.close, self._fd)
        self._map: mmap.mmap | None = mmap.mmap(self._fd, self.nbytes)
        if hasattr(mmap, "MADV_RANDOM"):  # a fault reads its own page and no others
            self._map.madvise(mmap.MADV_RANDOM)
        self._entries: Bytes | None = np.ndarray(
            (lines, slots, entry_bytes),
            np.uint8,
            buffer=self._map,
            strides=(self._line_pages * PAGE, entry_bytes, 1),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.lines * self._line_pages * PAGE

    def pages(self, slots: int) -> int:
        """Pages of so many slots of one line."""
        return -(-slots * self.entry_bytes // PAGE)

    def ranges(self, first: int, stop: int) -> Iterator[slice]:
        """The slots from ``first`` to ``stop``, cut so that few pages are in use at a time."""
        size = max(1, WINDOW * PAGE // self.entry_bytes)
        while first < stop:
            end = min(stop, (first // size + 1) * size)
            yield slice(first, end)
            first = end

    @contextmanager
    def reading(self, line: int, slots: slice) -> Iterator[Bytes]:
        """Inside the block, the entries ``(n, E)`` of a range of `ranges`."""
        with self._using(line, self._span(slots)):
            yield self._content[line, slots]

    def read_at(self, line: int, slots: Indices) -> Bytes:
        """Copies of the entries ``(n, E)`` at ``slots`` ``(n,)``."""
        out = np.empty((len(slots), self.entry_bytes), np.uint8)
        order = np.argsort(slots, kind="stable")
        for part in np.split(order, range(WINDOW, len(order), WINDOW)):
            with self._using(line, self._pages_of(slots[part])):
                out[part] = self._content[line, slots[part]]
        return out

    def write(self, line: int, slots: slice, entries: Bytes, fresh: int) -> None:
        """Put entries ``(n, E)`` into a range of `ranges`; from slot ``fresh`` on nothing was
        written yet.
        """
        first = line * self._line_pages + self.pages(fresh)
        with self._using(line, self._span(slots), write=True, fresh=first):
            self._content[line, slots] = entries

    def write_at(self, line: int, slots: Indices, entries: Bytes) -> None:
        """Put entries ``(n, E)`` to ``slots`` ``(n,)``."""
        for start in range(0, len(slots), WINDOW):
            part = slice(start, start + WINDOW)
            with self._using(line, self._pages_of(slots[part]), write=True):
                self._content[line, slots[part]] = entries[part]

    def unmap(self, pages: set[int], *, cold: bool) -> None:
        """Let pages leave memory. Of a window of which nothing is in use all pages do, since the
        kernel may have mapped more than was asked for.
        """
        table = self._owner.table
        last = self.nbytes // PAGE
        for window in {page // WINDOW for page in pages}:
            around = range(window * WINDOW, min(last, (window + 1) * WINDOW))
            if any(Page(self.number, page) in table for page in around):
                for page in pages.intersection(around):
                    self._leave(page, 1, cold)
            else:
                self._leave(around.start, len(around), cold)

    def settle(self) -> None:
        """Bring what was written to the disk; pages that are mapped stay in memory."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Remove the file."""
        self._entries = None
        if self._map is not None:
            self._map.close()
            self._map = None
        self._release()

    @property
    def _content(self) -> Bytes:
        assert self._entries is not None
        return self._entries

    @property
    def _owner(self) -> PagedMemory:
        memory = self._memory()
        assert memory is not None
        return memory

    def _using(
        self, line: int, pages: Iterable[int], *, write: bool = False, fresh: int | None = None
    ) -> AbstractContextManager[None]:
        start = line * self._line_pages
        numbers = (start + page for page in pages)
        return self._owner.using(self.number, numbers, write=write, fresh=fresh)

    def _span(self, slots: slice) -> range:
        return range(slots.start * self.entry_bytes // PAGE, self.pages(slots.stop))

    def _pages_of(self, slots: Indices) -> list[int]:
        starts = slots * self.entry_bytes
        ends = starts + (self.entry_bytes - 1)
        return np.unique(np.concatenate([starts // PAGE, ends // PAGE])).tolist()

    def _leave(self, page: int, count: int, cold: bool) -> None:
        assert self._map is not None
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, page * PAGE, count * PAGE)
        if cold:
            os.posix_fadvise(self._fd, page * PAGE, count * PAGE, os.POSIX_FADV_DONTNEED)


def _create(directory: Path, nbytes: int) -> int:
    try:
        fd, _ = scratch.create(directory, named=False)
    except OSError as error:
        if error.errno in _REFUSED:
            raise InputError(
                f"home_dir={str(directory)!r} is not valid: it must be a directory that can be "
                f"written to ({error.strerror})"
            ) from error
        raise HomeError(f"no file can be made in {directory} ({error.strerror})") from error
    try:
        scratch.lengthen(fd, 0, nbytes)  # a full disk must show here: in a mapping it is a signal
    except OSError as error:
        with suppress(OSError):
            os.close(fd)
        raise HomeError(
            f"the paged home in {directory} needs {nbytes} bytes ({error.strerror}): use a shorter "
            "prompt or a smaller batch, or choose another home_dir"
        ) from error
    return fd
