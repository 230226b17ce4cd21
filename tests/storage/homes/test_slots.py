"""The slot map against a naive list of tokens, for every eviction."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infinigen_kv.errors import CacheStateError, InputError
from infinigen_kv.rehearsal.checkpoints import PART, TURN, Checkpoints
from infinigen_kv.storage.homes.slots import EVICTIONS, SATURATED, Eviction, SlotMap


@dataclass
class Token:
    position: int
    slot: int
    used: int = 0  # time of the last use
    count: int = 0


class NaiveMap:
    """The rules as they are written down, one token at a time."""

    def __init__(self, capacity: int | None, eviction: Eviction, sinks: int = 0) -> None:
        self.capacity, self.eviction = capacity, eviction
        self.sinks = sinks if capacity is None else min(sinks, capacity - 2)
        self.padding = 0
        self.tokens: list[Token] = []  # in order of writing
        self.seen = 0
        self.time = 0
        self.past: list[tuple[int, list[Token]]] = []  # before touches since the last token but one
        self.remembered: Checkpoints[list[Token]] = Checkpoints()

    @property
    def can_go_back(self) -> bool:
        return self.seen == len(self.tokens)

    def is_sink(self, position: int) -> bool:
        return self.padding <= position < self.padding + self.sinks

    def victims(self) -> list[Token]:
        """All tokens but the sinks, the next victim first and the newest last."""
        *old, newest = self.tokens
        score = {
            "fifo": lambda token: 0,
            "lru": lambda token: token.used,
            "counter": lambda token: token.count,
        }[self.eviction]
        old.sort(key=lambda token: (score(token), token.position))
        return [token for token in [*old, newest] if not self.is_sink(token.position)]

    def kept(self, count: int) -> list[int]:
        """Positions of those of the next tokens that find room beside the sinks held."""
        positions = list(range(self.seen, self.seen + count))
        sinks = sum(self.is_sink(token.position) for token in self.tokens)
        while self.capacity is not None and sinks + len(positions) > self.capacity:
            positions.remove(next(each for each in positions if not self.is_sink(each)))
        return positions

    def add(self, count: int) -> list[int]:
        self.time += 1
        self.past = [each for each in self.past if each[0] == self.seen]
        slots = []
        queue = self.victims() if self.tokens else []
        new: list[Token] = []
        kept = self.kept(count)
        for _ in range(count):
            token = Token(self.seen, -1, self.time)
            self.seen += 1
            if token.position in kept:
                if self.capacity is None or len(self.tokens) + len(new) < self.capacity:
                    token.slot = len(self.tokens) + len(new)
                else:
                    victim = queue.pop(0)
                    self.tokens.remove(victim)
                    token.slot, token.count = victim.slot, victim.count
                new.append(token)
            slots.append(token.slot)
        self.tokens += new
        return slots

    def touch(self, slots: set[int]) -> None:
        self.time += 1
        if self.can_go_back:
            self.past.append((self.seen, deepcopy(self.tokens)))
        for token in self.tokens:
            if token.slot in slots:
                token.used = self.time
                token.count += 1
        if any(token.count >= SATURATED for token in self.tokens):
            for token in self.tokens:
                token.count //= 2

    def remember(self, rank: int) -> None:
        self.past = []
        self.remembered = (
            self.remembered.noted(self.seen, deepcopy(self.tokens), rank)
            if self.can_go_back
            else Checkpoints()
        )

    def truncate(self, seen: int) -> None:
        undone = [tokens for length, tokens in self.past if length >= seen]
        self.past = [each for each in self.past if each[0] < seen]
        known = self.remembered.at(seen)
        if known is not None and seen < self.seen:
            self.tokens = deepcopy(known)
        elif undone:
            self.tokens = undone[0]
        self.remembered = self.remembered.truncated(seen)
        self.tokens = [token for token in self.tokens if token.position < seen]
        self.seen = min(self.seen, seen)
        self.padding = self.padding if seen else 0


class SlotMachine(RuleBasedStateMachine):
    """Random operations on a map and its naive model."""

    eviction: Eviction

    @initialize(
        capacity=st.sampled_from([None, 2, 3, 5, 8, 300]), sinks=st.sampled_from([0, 0, 1, 4])
    )
    def start(self, capacity: int | None, sinks: int) -> None:
        self.slots = SlotMap(capacity, self.eviction, sinks=sinks)
        self.model = NaiveMap(capacity, self.eviction, sinks)

    @precondition(lambda self: self.model.seen <= self.model.padding)  # nothing but padding so far
    @rule(more=st.sampled_from([0, 1, 2, 6, 25]))
    def pad(self, more: int) -> None:
        self.slots.padding = self.model.padding = self.model.seen + more

    @rule(count=st.sampled_from([0, 1, 1, 1, 1, 2, 3, 4, 7, 20]))
    def add(self, count: int) -> None:
        newest = self.slots.tokens_seen - 1
        assert self.slots.add(count).tolist() == self.model.add(count)
        if count == 1 and newest >= 0:
            assert newest in self.slots.positions

    @precondition(lambda self: self.slots.length > 0)
    @rule(data=st.data(), steps=st.sampled_from([1, 1, 1, 100, 200]))
    def touch(self, data: st.DataObject, steps: int) -> None:
        used = st.integers(0, self.slots.length - 1)
        chosen = data.draw(st.lists(used, max_size=8))  # repeats on purpose
        for _ in range(steps):
            self.slots.touch(np.array(chosen, dtype=np.int64))
            if chosen:
                self.model.touch(set(chosen))

    @rule(seen=st.integers(-2, 40))
    def truncate(self, seen: int) -> None:
        evicted = self.slots.tokens_seen > self.slots.length
        if evicted and 0 < seen < self.slots.tokens_seen:
            with pytest.raises(CacheStateError, match=str(self.slots.capacity)):
                self.slots.truncate(seen)
        else:
            self.slots.truncate(seen)
            self.model.truncate(max(0, seen))

    @rule()
    def remember(self) -> None:
        rank = TURN if self.slots._touched else PART
        self.slots.remember()
        self.model.remember(rank)

    @rule()
    def copy(self) -> None:
        before = self.slots
        self.slots = before.copy()
        before.add(1)  # the copy must not follow
        before.touch(np.array([0]))

    @invariant()
    def state_is_the_same(self) -> None:
        tokens = sorted(self.model.tokens, key=lambda token: token.slot)
        assert self.slots.tokens_seen == self.model.seen
        assert self.slots.length == len(tokens)
        assert [token.slot for token in tokens] == list(range(len(tokens)))
        assert self.slots.positions.tolist() == [token.position for token in tokens]
        if self.eviction == "counter":
            assert self.slots.counts.tolist() == [token.count for token in tokens]

    @invariant()
    def every_token_has_one_slot(self) -> None:
        positions = self.slots.positions
        assert len(np.unique(positions)) == len(positions)
        assert self.slots.capacity is None or len(positions) <= self.slots.capacity
        if self.slots.tokens_seen:
            assert positions.max() == self.slots.tokens_seen - 1  # the newest is always there
        first = self.model.padding
        seen = range(first, min(first + self.model.sinks, self.model.seen))
        assert set(seen) <= set(positions.tolist())


def machine(which: Eviction) -> type[SlotMachine]:
    class Machine(SlotMachine):
        eviction = which

    Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
    return Machine


TestFifo = machine("fifo").TestCase
TestLru = machine("lru").TestCase
TestCounter = machine("counter").TestCase


def full(eviction: Eviction, capacity: int = 4, sinks: int = 0) -> SlotMap:
    slots = SlotMap(capacity, eviction, sinks=sinks)
    assert slots.add(capacity).tolist() == list(range(capacity))
    return slots


def test_fifo_takes_the_oldest_even_if_it_is_used() -> None:
    slots = full("fifo")
    slots.touch(np.array([0, 0, 0]))
    assert [slots.add(1).tolist() for _ in range(5)] == [[0], [1], [2], [3], [0]]
    assert slots.positions.tolist() == [8, 5, 6, 7]


@pytest.mark.parametrize("eviction", ["lru", "counter"])
@pytest.mark.parametrize("touches", [1, 3, SATURATED])
def test_what_forgotten_tokens_fetched_is_forgotten(eviction: Eviction, touches: int) -> None:
    """A turn of two tokens comes after two, is taken back, and then others fill the map."""
    used, fresh = SlotMap(4, eviction), SlotMap(4, eviction)
    for slots in (used, fresh):
        slots.add(2)
        slots.touch(np.array([1]))
        slots.remember()
    used.add(1)
    for _ in range(touches):
        used.touch(np.array([0]))
    used.add(1)
    used.truncate(2)
    for slots in (used, fresh):
        slots.add(2)
    assert used.counts.tolist() == fresh.counts.tolist()
    assert [used.add(1).tolist() for _ in range(6)] == [fresh.add(1).tolist() for _ in range(6)]


@pytest.mark.parametrize("added", [0, 1])
@pytest.mark.parametrize("eviction", ["lru", "counter"])
def test_a_step_that_failed_has_fetched_nothing(eviction: Eviction, added: int) -> None:
    used, fresh = SlotMap(4, eviction), SlotMap(4, eviction)
    for slots in (used, fresh):
        slots.add(3)
    used.touch(np.array([0, 2]))
    used.add(added)
    used.truncate(3)
    for slots in (used, fresh):
        slots.add(1)
    assert [used.add(1).tolist() for _ in range(4)] == [fresh.add(1).tolist() for _ in range(4)]


def test_lru_takes_the_least_recently_used() -> None:
    slots = full("lru")
    slots.touch(np.array([0, 2]))
    slots.touch(np.array([3]))
    assert [slots.add(1).tolist() for _ in range(4)] == [[1], [0], [2], [3]]


def test_counter_takes_the_least_fetched_and_the_oldest_of_several() -> None:
    slots = full("counter")
    slots.touch(np.array([0, 1]))
    slots.touch(np.array([0]))
    assert slots.counts.tolist() == [2, 1, 0, 0]
    assert slots.add(1).tolist() == [2]  # as rarely fetched as slot 3, and older
    assert slots.add(1).tolist() == [3]  # slot 2 is as rarely fetched, and newer
    assert slots.add(2).tolist() == [2, 1]


def test_a_new_token_inherits_its_victims_counter() -> None:
    slots = full("counter")
    for _ in range(10):
        slots.touch(np.arange(4))
    slots.touch(np.array([1, 2, 3]))
    assert slots.add(1).tolist() == [0]
    assert slots.counts.tolist() == [10, 11, 11, 11]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_the_newest_token_is_no_victim_even_if_only_others_are_used(eviction: Eviction) -> None:
    slots = full(eviction, capacity=3)
    for _ in range(200):
        newest = slots.tokens_seen - 1
        slots.touch(np.flatnonzero(slots.positions != newest))
        slots.add(1)
        assert newest in slots.positions


def test_all_counters_are_halved_when_one_saturates() -> None:
    slots = full("counter")
    for step in range(SATURATED - 1):
        slots.touch(np.array([0, 1] if step < 101 else [0]))
    assert slots.counts.tolist() == [254, 101, 0, 0]
    slots.touch(np.array([0, 2]))
    assert slots.counts.tolist() == [127, 50, 0, 0]
    assert slots.add(1).tolist() == [2]  # positions survived the halving


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_prompt_longer_than_the_pool_keeps_its_end(eviction: Eviction) -> None:
    slots = SlotMap(3, eviction)
    assert slots.add(5).tolist() == [-1, -1, 0, 1, 2]
    assert slots.positions.tolist() == [2, 3, 4]
    assert (slots.length, slots.tokens_seen) == (3, 5)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_prompt_longer_than_the_pool_keeps_its_sinks_and_its_end(eviction: Eviction) -> None:
    slots = SlotMap(5, eviction, sinks=2)
    assert slots.add(8).tolist() == [0, 1, -1, -1, -1, 2, 3, 4]
    assert slots.positions.tolist() == [0, 1, 5, 6, 7]
    assert slots.add(9).tolist() == [-1] * 6 + [2, 3, 4]
    assert slots.positions.tolist() == [0, 1, 14, 15, 16]


def test_the_sinks_of_a_padded_row_are_its_first_real_tokens() -> None:
    slots = SlotMap(4, "fifo", sinks=1)
    slots.padding = 3
    assert slots.add(7).tolist() == [-1, -1, -1, 0, 1, 2, 3]
    assert slots.add(2).tolist() == [1, 2]
    assert slots.positions.tolist() == [3, 7, 8, 6]


def test_padding_is_evicted_and_forgotten_with_its_row() -> None:
    slots = SlotMap(4, "fifo", sinks=1)
    slots.padding = 2
    assert slots.add(4).tolist() == [0, 1, 2, 3]
    assert [slots.add(1).tolist() for _ in range(4)] == [[0], [1], [3], [0]]  # never slot 2
    slots.truncate(0)
    slots.add(6)
    assert slots.positions.tolist() == [0, 3, 4, 5]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_sinks_stay_though_only_others_are_used(eviction: Eviction) -> None:
    slots = full(eviction, capacity=5, sinks=3)
    for _ in range(300):
        slots.touch(np.array([3, 4]))
        slots.add(1)
        assert slots.positions[:3].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("capacity", "kept"), [(2, 0), (3, 1), (6, 4), (60, 5), (None, 5)])
def test_sinks_leave_two_slots_for_others(capacity: int | None, kept: int) -> None:
    assert SlotMap(capacity, sinks=5).sinks == kept


def test_a_negative_number_of_sinks_is_refused() -> None:
    with pytest.raises(InputError, match=r"sinks=-1 is not valid: .* integer >= 0"):
        SlotMap(4, sinks=-1)


def test_without_a_limit_slots_are_positions() -> None:
    slots = SlotMap(None)
    assert slots.add(300).tolist() == list(range(300))
    assert slots.add(1000).tolist() == list(range(300, 1300))
    assert slots.positions.tolist() == list(range(1300))
    slots.truncate(10)
    assert slots.add(1).tolist() == [10]


def test_filling_up_and_overwriting_at_once_after_going_back() -> None:
    slots = full("fifo", capacity=5)
    slots.truncate(3)
    assert slots.add(4).tolist() == [3, 4, 0, 1]
    assert slots.positions.tolist() == [5, 6, 2, 3, 4]


@pytest.mark.parametrize("capacity", [1, 0, -5])
def test_too_small_a_capacity_is_refused(capacity: int) -> None:
    with pytest.raises(InputError, match=rf"capacity={capacity} is not valid: .* integer >= 2"):
        SlotMap(capacity)


def test_an_unknown_eviction_is_refused() -> None:
    with pytest.raises(InputError, match=r"eviction='random' is not valid: .* fifo, lru, counter"):
        SlotMap(4, "random")  # type: ignore[arg-type]


@pytest.mark.parametrize("slot", [-1, 2])
def test_touching_an_unused_slot_is_refused(slot: int) -> None:
    slots = SlotMap(4)
    slots.add(2)
    with pytest.raises(InputError, match="in use, 0 to 1"):
        slots.touch(np.array([0, slot]))
