"""Capped homes driven by slot maps, against a dictionary of the tokens that should be there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch import Tensor

from infinigen_kv.errors import CacheStateError, InfiniGenError
from infinigen_kv.storage.homes.capped import CappedHome
from infinigen_kv.storage.homes.codec import CODECS, GROUP, codec_by_name
from infinigen_kv.storage.homes.slots import EVICTIONS, Eviction, SlotMap
from infinigen_kv.storage.homes.store import RamStore

HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5
HALF_SCALE = {"none": 0.0, "int8": 1.001 / 255, "int4": 1.001 / 15}  # for numbers in -1 to 1


def tokens(rows: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values between -1 and 1."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(rows, HEADS, count, KEY_DIM, generator=generator) * 2 - 1
    return keys, torch.rand(rows, HEADS, count, VALUE_DIM, generator=generator) * 2 - 1


class CheckingStore(RamStore):
    """Refuses what a store need not support."""

    def write(self, slots: Tensor, entries: Tensor) -> None:
        for row in slots:
            used = row[row >= 0]
            assert len(used.unique()) == len(used)
            assert (used < self.length).all()
        super().write(slots, entries)


def empty_home(name: str, capacity: int, rows: int = 2) -> CappedHome:
    return CappedHome(*tokens(rows, 0, 0), codec_by_name(name), CheckingStore, capacity)


class CappedMachine(RuleBasedStateMachine):
    """Rows use their tokens differently, so that each evicts others."""

    codec: str

    @initialize(
        capacity=st.sampled_from([2, 10, 40, 100]),
        eviction=st.sampled_from(EVICTIONS),
        sinks=st.sampled_from([0, 1, 5]),
        padding=st.sampled_from([0, 3, 40]),
    )
    def start(self, capacity: int, eviction: Eviction, sinks: int, padding: int) -> None:
        self.home = empty_home(self.codec, capacity)
        self.slots = [SlotMap(capacity, eviction, sinks=sinks) for _ in range(2)]
        self.slots[1].padding = padding
        # per row: position -> key and value
        self.exact: list[dict[int, tuple[Tensor, Tensor]]] = [{}, {}]
        self.passes = 1

    @rule(count=st.sampled_from([1, 1, 1, 2, 5, 31, 32, 33, 70, 130]), seed=st.integers(0, 99))
    def add(self, count: int, seed: int) -> None:
        keys, values = tokens(len(self.slots), count, seed)
        for row, tokens_of_row in enumerate(self.exact):
            for token in range(count):
                entry = keys[row, :, token].clone(), values[row, :, token].clone()
                tokens_of_row[self.slots[row].tokens_seen + token] = entry
        slots = torch.stack([torch.from_numpy(row.add(count)) for row in self.slots])
        self.home.write(slots, keys, values)
        keys.zero_()
        values.zero_()

    @precondition(lambda self: self.home.length > 0)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        for row in self.slots:
            used = data.draw(st.lists(st.integers(0, row.length - 1), max_size=8))
            row.touch(np.array(used, dtype=np.int64))

    @rule(data=st.data())
    def take_rows(self, data: st.DataObject) -> None:
        places = st.integers(0, len(self.slots) - 1)
        index = data.draw(st.lists(places, min_size=1, max_size=3))
        self.home.take_rows(torch.tensor(index))
        self.slots = [self.slots[place].copy() for place in index]
        self.exact = [dict(self.exact[place]) for place in index]

    @rule(seen=st.integers(0, 130))
    def truncate(self, seen: int) -> None:
        row = self.slots[0]
        if row.tokens_seen > row.length and 0 < seen < row.length:
            with pytest.raises(CacheStateError, match="evicted"):
                self.home.truncate(seen)
        elif row.tokens_seen == row.length or seen == 0:
            self.home.truncate(seen)
            for row in self.slots:
                row.truncate(seen)
            self.passes += 1

    @precondition(lambda self: self.home.length > 0)
    @rule(seed=st.integers(0, 999), new=st.sampled_from([1, 40, 130]))
    def a_reading_does_not_see_later_tokens(self, seed: int, new: int) -> None:
        shape = len(self.slots), HEADS, 5
        generator = torch.Generator().manual_seed(seed)
        slots = torch.randint(0, self.home.length, shape, generator=generator)
        expected = self.home.gather(slots)
        reading = self.home.prepare(slots)
        entries = self.home.store.read(reading.slots).clone()
        self.add(new, seed)
        for found, before in zip(reading.decode(entries), expected, strict=True):
            assert torch.equal(found, before)

    @invariant()
    def content_is_the_same(self) -> None:
        assert self.home.length == self.slots[0].length
        found = self.home.all()
        allowed = self.passes * HALF_SCALE[self.codec]
        for row, slots in enumerate(self.slots):
            for part in range(2):
                expected = [
                    self.exact[row][position][part] for position in slots.positions.tolist()
                ]
                if expected:
                    error = (found[part][row] - torch.stack(expected, dim=1)).abs().max()
                    assert error <= allowed


def machine(name: str) -> type[CappedMachine]:
    class Machine(CappedMachine):
        codec = name

    Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
    return Machine


TestNone = machine("none").TestCase
TestInt8 = machine("int8").TestCase
TestInt4 = machine("int4").TestCase


@pytest.mark.parametrize("name", CODECS)
def test_without_evictions_it_is_a_packed_home(name: str) -> None:
    keys, values = tokens(2, 3 * GROUP + 5, seed=1)
    home = empty_home(name, capacity=200)
    home.append(keys, values)
    plain = super(CappedHome, home).prepare_all()
    for found, expected in zip(home.all(), plain.decode(home.store.read_all()), strict=True):
        assert torch.equal(found, expected)


def test_the_tail_counts_as_not_stored_though_all_slots_exist() -> None:
    home = empty_home("int8", capacity=2 * GROUP)
    home.append(*tokens(2, 2 * GROUP, seed=6))
    assert home.stored_length == home.length == 2 * GROUP
    keys, values = tokens(2, 3, seed=7)
    home.write(torch.tensor([[4, 5, 6], [0, 63, 1]]), keys, values)
    assert home.stored_length == 2 * GROUP - 3
    slots = torch.tensor([[4, 5, 6], [0, 63, 1]])[:, None].expand(2, HEADS, 3)
    for found, expected in zip(home.gather(slots), (keys, values), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_groups_are_used_again_once_no_slot_needs_them(eviction: Eviction) -> None:
    random = np.random.default_rng(4)
    capacity, start = 300, 250
    home = empty_home("int8", capacity)
    maps = [SlotMap(capacity, eviction) for _ in range(2)]
    keys, values = tokens(2, 3000, seed=4)
    for count in (start, *[11] * 250):
        part = slice(maps[0].tokens_seen, maps[0].tokens_seen + count)
        slots = torch.stack([torch.from_numpy(row.add(count)) for row in maps])
        home.write(slots, keys[:, :, part], values[:, :, part])
        for row in maps:
            row.touch(random.integers(0, row.length, 20) ** 2 // row.length)
    assert maps[0].tokens_seen == 3000
    assert not np.array_equal(maps[0].positions, maps[1].positions) or eviction == "fifo"
    for found, exact in zip(home.all(), (keys, values), strict=True):
        for got, wanted, row in zip(found, exact, maps, strict=True):
            assert (got - wanted[:, row.positions]).abs().max() <= HALF_SCALE["int8"]


def test_scales_do_not_grow_with_the_tokens_seen() -> None:
    home = empty_home("int4", capacity=1000, rows=1)
    slots = SlotMap(1000, "fifo")
    size = home.side_bytes
    for step in range(60):
        home.write(torch.from_numpy(slots.add(500))[None], *tokens(1, 500, seed=step))
    assert home.side_bytes == size


def test_a_prompt_that_does_not_fit_leaves_its_end() -> None:
    home, slots = empty_home("int8", capacity=100), SlotMap(100, "counter")
    keys, values = tokens(2, 2500, seed=5)
    home.write(torch.from_numpy(slots.add(2500)).expand(2, -1), keys, values)
    assert home.length == 100
    for found, exact in zip(home.all(), (keys, values), strict=True):
        assert (found - exact[:, :, -100:]).abs().max() <= HALF_SCALE["int8"]
    with pytest.raises(CacheStateError):
        home.truncate(50)
    home.truncate(0)
    home.append(keys[:, :, :40], values[:, :, :40])
    home.truncate(20)
    assert home.length == 20


@pytest.mark.parametrize("name", CODECS)
def test_a_prompt_that_does_not_fit_leaves_its_sinks_too(name: str) -> None:
    """Rows with their sinks at different places: what one row keeps another drops."""
    count, capacity, sinks, padding = 2500, 100, 3, (0, 70)
    home, maps = empty_home(name, capacity), []
    for skipped in padding:
        maps.append(SlotMap(capacity, sinks=sinks))
        maps[-1].padding = skipped
    keys, values = tokens(2, count, seed=6)
    home.write(torch.stack([torch.from_numpy(row.add(count)) for row in maps]), keys, values)
    assert home.length == capacity
    for found, exact in zip(home.all(), (keys, values), strict=True):
        for row, skipped in enumerate(padding):
            kept = [*range(skipped, skipped + sinks), *range(count - capacity + sinks, count)]
            assert (found[row] - exact[row][:, kept]).abs().max() <= HALF_SCALE[name]


def test_a_token_that_cannot_be_packed_leaves_the_home_as_it_was() -> None:
    home = empty_home("int8", capacity=50)
    home.append(*tokens(2, 50, seed=2))
    before = home.all()
    keys, values = tokens(2, 20, seed=3)
    keys[0, 0, 3, 0] = float("inf")
    with pytest.raises(InfiniGenError, match="keys cannot be quantised"):
        home.write(torch.arange(20).expand(2, -1), keys, values)
    for found, expected in zip(home.all(), before, strict=True):
        assert torch.equal(found, expected)
