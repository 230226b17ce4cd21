"""The link: its emulated pace against arithmetic on a clock of the test's own, its book-keeping."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infinigen_kv.errors import InputError
from infinigen_kv.storage.homes.store import RamStore
from infinigen_kv.storage.link import PAPER_RATIO, Link, LinkSpec, Pace, paper_rate
from infinigen_kv.storage.link import base as link_module
from waiting import PATIENCE

RATE, LATENCY = 1000.0, 0.25  # bytes per second, seconds
ROWS, HEADS, ENTRY = 2, 3, 10


class Clock:
    """Seconds that pass only when the test says so, or when somebody sleeps or looks."""

    def __init__(self, step: float = 0.0) -> None:
        self.now = 100.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of everything in `link`; each look at it takes a microsecond."""
    clock = Clock(step=1e-6)
    monkeypatch.setattr(link_module.time, "perf_counter", clock)
    monkeypatch.setattr(link_module.time, "sleep", clock.sleep)
    return clock


def filled_store(length: int = 6) -> tuple[RamStore, Tensor]:
    store = RamStore(ROWS, HEADS, ENTRY)
    numbers = torch.arange(ROWS * HEADS * length * ENTRY) % 251
    entries = numbers.to(torch.uint8).view(ROWS, HEADS, length, ENTRY)
    store.append(entries)
    return store, entries


def some_slots(*slots: int) -> Tensor:
    return torch.tensor(slots).expand(ROWS, HEADS, -1)


# Pace.


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    clock = Clock()
    pace = Pace(RATE, LATENCY, clock)
    assert pace.book(500) == pytest.approx(100.0 + 0.25 + 0.5)


def test_transfers_go_one_after_the_other() -> None:
    clock = Clock()
    pace = Pace(RATE, LATENCY, clock)
    assert [pace.book(1000) for _ in range(3)] == pytest.approx([101.25, 102.5, 103.75])
    clock.now = 110.0
    assert pace.book(0) == pytest.approx(110.25)


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(0, 10_000)), max_size=20),
    st.floats(1, 1e6),
    st.floats(0, 1),
)
def test_booked_times_are_those_of_a_queue(
    arrivals: list[tuple[float, int]], rate: float, latency: float
) -> None:
    clock = Clock()
    pace = Pace(rate, latency, clock)
    free = -math.inf
    for pause, nbytes in arrivals:
        clock.now += pause
        free = max(free, clock.now) + latency + nbytes / rate
        assert pace.book(nbytes) == pytest.approx(free)


def test_waiting_ends_no_earlier_and_soon_after(clock: Clock) -> None:
    pace = Pace(RATE, LATENCY, clock)
    pace.wait_until(clock.now + 0.5)
    assert 100.5 <= clock.now < 100.5001
    before = clock.now
    pace.wait_until(before - 1)
    assert clock.now < before + 1e-5, "waited for a time that is over"


# Transfers.


def test_fetched_entries_are_those_of_the_store() -> None:
    store, entries = filled_store()
    link = Link()
    slots = torch.tensor([[[5, 0], [1, 1], [2, 3]], [[0, 1], [4, 5], [3, 3]]])
    expected = entries.gather(2, slots.unsqueeze(-1).expand(-1, -1, -1, ENTRY))
    assert torch.equal(link.fetch(store, slots, 12).wait(), expected)
    assert torch.equal(link.fetch_all(store).wait(), entries)


def test_a_transfer_holds_what_the_store_held_at_its_start() -> None:
    store, entries = filled_store()
    link = Link()
    some, everything = link.fetch(store, some_slots(0, 5), 12), link.fetch_all(store)
    store.write(torch.tensor([[0, 5]] * ROWS), torch.zeros(ROWS, HEADS, 2, ENTRY).byte())
    store.append(entries[:, :, :3])
    assert torch.equal(everything.wait(), entries)
    assert torch.equal(some.wait(), entries[:, :, [0, 5]])


def test_emulated_transfers_end_no_earlier_than_they_may(clock: Clock) -> None:
    store, _ = filled_store()
    link = Link(Pace(RATE, LATENCY, clock))
    start = clock.now
    first = link.fetch(store, some_slots(0), 6)  # 60 bytes
    second = link.fetch_all(store)  # 360 bytes
    assert clock.now < start + 1e-4, "starting a transfer waits"
    first.wait()
    assert start + 0.31 <= clock.now < start + 0.311
    second.wait()
    assert start + 0.31 + 0.61 <= clock.now < start + 0.921


def test_both_directions_share_the_link(clock: Clock) -> None:
    store, _ = filled_store()
    link = Link(Pace(RATE, LATENCY, clock))
    start = clock.now
    link.sent(2000)
    assert clock.now < start + 1e-4, "sending waits"
    link.fetch(store, some_slots(0), 6).wait()
    assert start + 2.25 + 0.31 <= clock.now < start + 2.561
    assert link.statistics.bytes_up == 2000


def test_time_between_start_and_wait_counts_as_transfer(clock: Clock) -> None:
    store, _ = filled_store()
    link = Link(Pace(RATE, LATENCY, clock))
    transfer = link.fetch(store, some_slots(0), 6)
    clock.now += 0.3
    transfer.wait()
    assert link.statistics.wait_seconds == pytest.approx(0.01, abs=1e-3)
    assert link.statistics.transfer_seconds == pytest.approx(0.31, abs=1e-3)
    transfer = link.fetch(store, some_slots(0), 6)
    clock.now += 5
    transfer.wait()
    assert link.statistics.wait_seconds == pytest.approx(0.01, abs=1e-3)
    assert link.statistics.transfer_seconds == pytest.approx(0.62, abs=1e-3)


def test_statistics_count_real_entries_and_start_anew() -> None:
    store, _ = filled_store(length=6)
    link = Link()
    link.fetch(store, some_slots(0, 1, 2), 11).wait()
    link.fetch_all(store).wait()
    link.sent(77)
    seen = link.statistics
    assert (seen.bytes_down, seen.bytes_up) == (11 * ENTRY + ROWS * HEADS * 6 * ENTRY, 77)
    assert seen.transfers == 2
    assert 0 <= seen.wait_seconds <= seen.transfer_seconds
    seen.reset()
    assert (seen.bytes_down, seen.bytes_up, seen.transfers) == (0, 0, 0)
    assert (seen.wait_seconds, seen.transfer_seconds) == (0, 0)


# Threads.


def test_links_to_memory_have_no_threads() -> None:
    link = Link(Pace(RATE))
    assert link.readers is None and link.writer is None
    link.close()


def test_close_waits_and_ends_the_threads() -> None:
    before = set(threading.enumerate())
    link = Link(queue_depth=3)
    assert link.readers is not None and link.writer is not None
    meeting = threading.Barrier(3)  # three readers at once, or the test fails
    jobs: list[Future[Any]] = [link.readers.submit(meeting.wait, PATIENCE) for _ in range(3)]
    order: list[int] = []
    jobs += [link.writer.submit(order.append, number) for number in range(50)]
    assert len(set(threading.enumerate()) - before) == 4
    assert jobs[-1].result(PATIENCE) is None
    link.close()
    link.close()
    assert order == list(range(50))
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError):
        link.readers.submit(print)


# What the user writes.


@pytest.mark.parametrize(
    ("text", "rate", "latency"),
    [
        ("emulated:16", 16e9, 0.0),
        ("emulated:0.5,10", 0.5e9, 10e-6),
        ("emulated:1e-3,2.5", 1e6, 2.5e-6),
        ("emulated:32,0", 32e9, 0.0),
    ],
)
def test_rates_and_latencies(text: str, rate: float, latency: float) -> None:
    spec = LinkSpec.parse(text)
    assert spec.rate == pytest.approx(rate) and spec.latency == pytest.approx(latency)
    assert spec.is_emulated and not spec.is_paper and spec.text == text


def test_links_without_a_rate_of_their_own() -> None:
    none, paper = LinkSpec.parse("none"), LinkSpec.parse("emulated:paper")
    assert (none.rate, none.is_emulated, none.is_paper) == (None, False, False)
    assert (paper.rate, paper.is_emulated, paper.is_paper) == (None, True, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pcie",
        "None",
        "emulated",
        "emulated:",
        "emulated:0",
        "emulated:-1",
        "emulated:inf",
        "emulated:nan",
        "emulated:e",
        "emulated:1e999",
        "emulated:1.2.3",
        "emulated:16,",
        "emulated:16,-1",
        "emulated:16,1e999",
        "emulated:16,2,3",
        "emulated:16 ",
        "emulated:16\n",
        "emulated:16GB",
        "emulated:paper,10",
    ],
)
def test_links_that_there_are_not(text: str) -> None:
    with pytest.raises(InputError) as error:
        LinkSpec.parse(text)
    message = str(error.value)
    assert f"link={text!r}" in message
    assert "none" in message and "emulated:paper" in message and "GB/s" in message


@pytest.mark.parametrize("value", [None, 16, 1.5, ["none"]])
def test_links_that_are_no_text(value: Any) -> None:
    with pytest.raises(InputError, match="link="):
        LinkSpec.parse(value)


def test_paper_rate_makes_streaming_a_layer_as_slow_as_in_figure_18() -> None:
    assert PAPER_RATIO == 18.5
    rate = paper_rate(37_000, 0.01)
    assert 37_000 / rate == pytest.approx(0.185)
