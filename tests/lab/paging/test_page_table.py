"""Pages in memory against a list in the order of use."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from infinigen_kv_lab.paging.page_table import Page, PageTable


@settings(max_examples=80)
@given(
    limits=st.integers(1, 5),
    accesses=st.lists(
        st.tuples(st.integers(0, 1), st.lists(st.integers(0, 6), max_size=4), st.booleans()),
        max_size=30,
    ),
)
def test_the_least_recently_used_page_leaves(
    limits: int, accesses: list[tuple[int, list[int], bool]]
) -> None:
    table = PageTable(limits)
    order: list[tuple[int, int]] = []  # the next to leave first
    dirty: set[tuple[int, int]] = set()
    read = written = 0
    for area, numbers, write in accesses:
        leaving = []
        for number in numbers:
            page = (area, number)
            if page in order:
                order.remove(page)
            else:
                read += 1
                if len(order) == limits:
                    gone = order.pop(0)
                    leaving.append((gone, gone in dirty))
                    written += gone in dirty
                    dirty.discard(gone)
            order.append(page)
            if write:
                dirty.add(page)
        evicted = table.touch(area, numbers, write=write)
        assert [((page.area, page.number), was) for page, was in evicted] == leaving
        assert len(table) == len(order) and all(Page(*page) in table for page in order)
    faults = table.faults.take()
    assert (faults.read, faults.written) == (read, written)
    assert (table.faults.read, table.faults.written) == (0, 0)


def test_a_scan_of_more_than_fits_finds_nothing() -> None:
    table = PageTable(9)
    for _ in range(3):
        table.touch(0, range(10))
    assert table.faults.read == 30
    table.limit = 10
    for _ in range(3):
        table.touch(0, range(10))
    assert table.faults.read == 31  # 9 of them were there, and now all are


def test_a_smaller_limit_holds_at_the_next_page() -> None:
    table = PageTable(5)
    table.touch(0, range(5), write=True)
    table.limit = 2
    assert [page.number for page, _ in table.touch(0, [7])] == [0, 1, 2, 3]
    assert len(table) == 2


def test_fresh_pages_need_no_reading() -> None:
    table = PageTable(9)
    table.touch(0, range(4), write=True, fresh=2)
    assert table.faults.read == 2


def test_what_is_forgotten_is_not_written_back() -> None:
    table = PageTable(2)
    table.touch(0, [1], write=True)
    table.touch(1, [1], write=True)
    table.forget(0)
    assert len(table) == 1 and Page(1, 1) in table
    assert table.touch(1, [2, 3]) == [(Page(1, 1), True)]
    assert table.faults.written == 1
