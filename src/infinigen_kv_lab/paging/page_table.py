"""Which pages of a memory-mapped home are in memory, and which one goes next: no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Page(NamedTuple):
    """A page of an area; areas have numbers."""

    area: int
    number: int


class Evicted(NamedTuple):
    """A page that has to leave, and whether it was written to since it came."""

    page: Page
    dirty: bool


@dataclass(slots=True)
class Faults:
    """Pages that were brought in, and dirty ones that were brought back, since the last `take`."""

    read: int = 0
    written: int = 0

    def take(self) -> Faults:
        """The totals so far; counts anew from now on."""
        so_far = Faults(self.read, self.written)
        self.read = self.written = 0
        return so_far


class PageTable:
    """At most ``limit`` pages, the least recently used leaves first, as an operating system does.

    Parameters
    ----------
    limit
        Pages, at least 1; may be changed at any time.
    """

    def __init__(self, limit: int = 1) -> None:
        self.limit = limit
        self.faults = Faults()
        self._pages: OrderedDict[Page, bool] = OrderedDict()  # whether each is dirty

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: Page) -> bool:
        return page in self._pages

    def touch(
        self, area: int, numbers: Iterable[int], *, write: bool = False, fresh: int | None = None
    ) -> list[Evicted]:
        """Use pages; those beyond the limit leave.

        Parameters
        ----------
        area, numbers
            The pages, in the order of use.
        write
            They become dirty.
        fresh
            Pages from this number on hold nothing yet, so that nothing has to be read.
        """
        leaving = []
        for number in numbers:
            page = Page(area, number)
            dirty = self._pages.pop(page, None)
            if dirty is None:
                dirty = False
                if fresh is None or number < fresh:
                    self.faults.read += 1
                if len(self._pages) >= self.limit:
                    leaving += self._shrink(self.limit - 1)
            self._pages[page] = dirty or write
        return leaving

    def forget(self, area: int) -> None:
        """An area is gone, and what its pages held is of no use."""
        for page in [page for page in self._pages if page.area == area]:
            del self._pages[page]

    def _shrink(self, size: int) -> list[Evicted]:
        leaving = []
        while len(self._pages) > size:
            page, dirty = self._pages.popitem(last=False)
            self.faults.written += dirty
            leaving.append(Evicted(page, dirty))
        return leaving
