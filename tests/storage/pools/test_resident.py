"""The resident set, in PyTorch and compiled, against a naive dictionary."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from infinigen_kv.storage.pools.resident import ResidentSet

ROWS, HEADS, DIM = 2, 2, 3
Kind = type[ResidentSet]
KINDS: list[Kind] = [ResidentSet]
if find_spec("numba"):
    from infinigen_kv.kernels.native.resident_set import NativeResidentSet

    KINDS.append(NativeResidentSet)

pytestmark = pytest.mark.parametrize("kind", KINDS)


class Naive:
    """One head: fetched entries by slot with the step of their last use, and a ring of newest."""

    def __init__(self, budget: int, ring: int) -> None:
        self.budget, self.ring = budget, ring
        self.fetched: dict[int, int] = {}
        self.newest: list[int] = []
        self.clock = 0

    def wants(self, slots: list[int]) -> list[int]:
        self.clock += 1
        hits = [slot for slot in slots if slot in self.fetched]
        for slot in hits:
            self.fetched[slot] = self.clock
        return [slot for slot in slots if slot not in self.fetched and slot not in self.newest]

    def admit(self, missed: list[int]) -> None:
        room = self.budget - len(self.fetched)
        oldest = sorted(self.fetched, key=self.fetched.__getitem__)
        for slot in oldest[: max(0, len(missed) - room)]:
            del self.fetched[slot]
        self.fetched.update(dict.fromkeys(missed, self.clock))

    def add(self, slot: int) -> None:
        self.fetched.pop(slot, None)
        self.newest = [other for other in self.newest if other != slot][-self.ring :] + [slot]
        self.newest = self.newest[-self.ring :]


def entries(store: list[Tensor], slots: Tensor) -> tuple[Tensor, ...]:
    """Keys and values of slots ``(B, H, n)`` from ``(B, H, T, D)`` stores."""
    index = slots[..., None].expand(*slots.shape, DIM)
    return tuple(each.gather(2, index) for each in store)


def held(resident: ResidentSet) -> list[list[set[int]]]:
    """Slots reachable through the map, per row and head."""
    return [
        [
            {
                slot
                for slot, place in enumerate(resident._place_of[r, h, :-1].tolist())
                if place != resident.spare_place
            }
            for h in range(HEADS)
        ]
        for r in range(ROWS)
    ]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), budget=st.integers(2, 6), ring=st.integers(1, 3))
def test_hits_and_contents_are_those_of_a_naive_lru(  # noqa: C901
    kind: Kind, data: st.DataObject, budget: int, ring: int
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    store = [torch.randn(ROWS, HEADS, 40, DIM, generator=generator) for _ in range(2)]
    resident = kind(*store, budget=budget, ring=ring)
    naive = [[Naive(budget, ring) for _ in range(HEADS)] for _ in range(ROWS)]
    tokens = 12
    resident.reserve(tokens)
    for _ in range(data.draw(st.integers(1, 12))):
        count = data.draw(st.integers(1, budget))
        slots = torch.stack(
            [torch.randperm(tokens, generator=generator)[:count] for _ in range(ROWS * HEADS)]
        ).view(ROWS, HEADS, count)
        missed = [
            [naive[r][h].wants(slots[r, h].tolist()) for h in range(HEADS)] for r in range(ROWS)
        ]
        places, misses = resident.look_up(slots, None)
        assert (misses.count if misses else 0) == sum(len(m) for row in missed for m in row)
        if misses is not None:
            resident.fill(misses, *entries(store, misses.slots))
        for row in range(ROWS):
            for head in range(HEADS):
                naive[row][head].admit(missed[row][head])
        for ours, theirs in zip(resident.gather(places), entries(store, slots), strict=True):
            assert torch.equal(ours, theirs)
        if data.draw(st.booleans()):  # a new token
            new = torch.full((ROWS, 1), tokens)
            tokens += 1
            resident.reserve(tokens)
            resident.add_new(new, *(each[:, :, tokens - 1 : tokens] for each in store))
            for heads in naive:
                for each in heads:
                    each.add(tokens - 1)
        expected = [[set(n.fetched) | set(n.newest) for n in row] for row in naive]
        # ties between entries of the same step may be broken either way, so compare sizes
        assert [[len(s) for s in row] for row in held(resident)] == [
            [len(s) for s in row] for row in expected
        ]
        for row in range(ROWS):
            for head in range(HEADS):
                real = resident._slot_of[row, head][resident._slot_of[row, head] >= 0].tolist()
                assert len(real) == len(set(real)) == len(held(resident)[row][head])
                naive[row][head].fetched = {
                    slot: int(resident._used[row, head, resident._place_of[row, head, slot]])
                    for slot in held(resident)[row][head] - set(naive[row][head].newest)
                }


class Times:
    """When each slot of one head was last wanted, for those that came by `fill`."""

    def __init__(self) -> None:
        self.last: dict[int, int] = {}

    def admit(self, wanted: list[int], missed: list[int], left: set[int], clock: int) -> None:
        """What went made room for ``missed``, and nothing that is ``left`` had waited longer."""
        gone = set(self.last) - left
        assert not gone & set(wanted)
        kept = [self.last[slot] for slot in left & set(self.last) - set(wanted)]
        assert all(self.last[slot] <= least for slot in gone for least in kept)
        for slot in gone:
            del self.last[slot]
        hits = set(wanted) & set(self.last)
        self.last.update(dict.fromkeys(hits | set(missed), clock))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), budget=st.integers(1, 9), ring=st.integers(1, 3))
def test_victims_are_those_used_longest_ago(
    kind: Kind, data: st.DataObject, budget: int, ring: int
) -> None:
    """Rows want different numbers of entries; some transfers fail."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    store = [torch.randn(ROWS, HEADS, 40, DIM, generator=generator) for _ in range(2)]
    resident = kind(*store, budget=budget, ring=ring, capacity=40)
    times = [[Times() for _ in range(HEADS)] for _ in range(ROWS)]
    tokens = 14
    for clock in range(data.draw(st.integers(1, 12))):
        count = data.draw(st.integers(1, budget))
        counts = data.draw(st.lists(st.integers(0, count), min_size=ROWS, max_size=ROWS))
        meant = (torch.arange(count) < torch.tensor(counts)[:, None])[:, None]
        slots = torch.rand(ROWS, HEADS, tokens, generator=generator).argsort(-1)[..., :count]
        before = held(resident)
        places, misses = resident.look_up(slots, meant)
        fails = misses is not None and data.draw(st.integers(0, 9)) == 0
        if misses is not None and fails:
            resident.forget(misses)
        elif misses is not None:
            resident.fill(misses, *entries(store, misses.slots))
        number = 0
        for row in range(ROWS):
            for head in range(HEADS):
                wanted = slots[row, head, : counts[row]].tolist()
                missed = [slot for slot in wanted if slot not in before[row][head]]
                number += len(missed)
                left = held(resident)[row][head]
                assert fails or set(wanted) <= left
                assert not fails or not set(missed) & left
                times[row][head].admit(wanted, [] if fails else missed, left, clock)
                if not fails:
                    where = places[row, head, : counts[row]]
                    kept = resident.in_place(places)
                    assert torch.equal(kept.keys[row, head, where], store[0][row, head, wanted])
                    assert torch.equal(kept.values[row, head, where], store[1][row, head, wanted])
        assert (misses.count if misses else 0) == number
        if data.draw(st.booleans()):
            new = torch.full((ROWS, 1), tokens)
            resident.add_new(new, *(each[:, :, tokens : tokens + 1] for each in store))
            tokens += 1
        check_maps(resident)


def check_maps(resident: ResidentSet) -> None:
    """A slot's place holds that slot, and no other slot has that place."""
    for row in range(ROWS):
        for head in range(HEADS):
            places = resident._place_of[row, head, :-1].tolist()
            slots = resident._slot_of[row, head].tolist()
            here = {
                slot: place for slot, place in enumerate(places) if place != resident.spare_place
            }
            assert {slot: place for place, slot in enumerate(slots[:-1]) if slot >= 0} == here


def full_store() -> list[Tensor]:
    base = torch.arange(ROWS * HEADS * 20 * DIM).view(ROWS, HEADS, 20, DIM).float()
    return [base, base + 0.5]


def test_padding_of_a_selection_is_not_fetched(kind: Kind) -> None:
    store = full_store()
    resident = kind(*store, budget=4, ring=1, capacity=20)
    slots = torch.tensor([5, 6, 7]).expand(ROWS, HEADS, 3).contiguous()
    meant = torch.tensor([[True, True, True], [True, False, False]])[:, None]
    _, misses = resident.look_up(slots, meant)
    assert misses.count == 3 * HEADS + 1 * HEADS
    assert held(resident)[1] == [{5}, {5}]


def test_warm_entries_and_ring_are_hits_once_each(kind: Kind) -> None:
    store = full_store()
    resident = kind(*store, budget=3, ring=2, capacity=20)
    resident.add_new(torch.tensor([[8, 9]] * ROWS), *(each[:, :, 8:10] for each in store))
    slots = torch.tensor([1, 9, 2]).expand(ROWS, HEADS, 3).contiguous()
    resident.fill_resident(slots, *entries(store, slots))
    wanted = torch.tensor([1, 2, 8, 9]).expand(ROWS, HEADS, 4).contiguous()
    places, misses = resident.look_up(wanted, None)
    assert misses is None
    for ours, theirs in zip(resident.gather(places), entries(store, wanted), strict=True):
        assert torch.equal(ours, theirs)
    used = resident._slot_of[resident._slot_of >= 0]
    assert len(used) == ROWS * HEADS * 4


def test_of_warm_entries_the_worst_go_first(kind: Kind) -> None:
    store = full_store()
    resident = kind(*store, budget=4, ring=1, capacity=20)
    best_first = torch.tensor([[[11, 3, 8], [2, 7, 5]]] * ROWS)  # and one empty place
    resident.fill_resident(best_first, *entries(store, best_first))
    for token, left in ((15, 3), (16, 2), (17, 1)):
        wanted = torch.full((ROWS, HEADS, 1), token)
        _, misses = resident.look_up(wanted, None)
        assert misses is not None
        resident.fill(misses, *entries(store, misses.slots))
        warm = [set(best_first[0, head, :left].tolist()) for head in range(HEADS)]
        new = set(range(15, token + 1))
        assert held(resident)[0] == [each | new for each in warm]


def test_overwritten_slot_is_its_new_token(kind: Kind) -> None:
    store = full_store()
    resident = kind(*store, budget=3, ring=1, capacity=20)
    slots = torch.tensor([4, 5]).expand(ROWS, HEADS, 2).contiguous()
    _, misses = resident.look_up(slots, None)
    assert misses is not None
    resident.fill(misses, *entries(store, misses.slots))
    fresh = [torch.full((ROWS, HEADS, 1, DIM), value) for value in (-1.0, -2.0)]
    resident.add_new(torch.full((ROWS, 1), 4), *fresh)
    places, misses = resident.look_up(slots, None)
    assert misses is None
    keys, values = resident.gather(places)
    assert (keys[:, :, 0] == -1).all()
    assert (values[:, :, 0] == -2).all()
    assert torch.equal(keys[:, :, 1], store[0][:, :, 5])


def test_tokens_that_are_dropped_at_once_leave_the_others(kind: Kind) -> None:
    store = full_store()
    resident = kind(*store, budget=2, ring=2, capacity=20)
    for token, slots in ((8, [[8], [-1]]), (9, [[-1], [9]]), (10, [[10], [10]])):
        resident.add_new(torch.tensor(slots), *(each[:, :, token : token + 1] for each in store))
        check_maps(resident)
    assert held(resident) == [[{10}, {10}], [{9, 10}, {9, 10}]]
    places, misses = resident.look_up(torch.full((ROWS, HEADS, 1), 10), None)
    assert misses is None
    assert torch.equal(resident.gather(places)[1], store[1][:, :, 10:11])


def test_a_slot_that_is_in_the_ring_can_be_written_again(kind: Kind) -> None:
    store = full_store()
    resident = kind(*store, budget=1, ring=2, capacity=20)
    for value in (1.0, 2.0, 3.0):
        fresh = [torch.full((ROWS, HEADS, 1, DIM), value) for _ in range(2)]
        resident.add_new(torch.full((ROWS, 1), 4), *fresh)
        check_maps(resident)
        places, misses = resident.look_up(torch.full((ROWS, HEADS, 1), 4), None)
        assert misses is None
        assert (resident.gather(places)[0] == value).all()
    assert held(resident) == [[{4}] * HEADS] * ROWS


def test_entries_of_a_codec_are_taken_as_they_lie(kind: Kind) -> None:
    """Keys beside values in one buffer, of two widths."""
    store = [torch.randn(ROWS, HEADS, 20, width) for width in (3, 5)]
    resident = kind(*store, budget=4, ring=1, capacity=20)
    slots = torch.tensor([7, 2, 9]).expand(ROWS, HEADS, 3).contiguous()
    places, misses = resident.look_up(slots, None)
    assert misses is not None
    moved = torch.cat([each.gather(2, misses.slots[..., None].expand(-1, -1, -1, each.shape[3]))
                       for each in store], dim=3)  # fmt: skip
    resident.fill(misses, *moved.split((3, 5), dim=3))
    for found, whole in zip(resident.gather(places), store, strict=True):
        assert torch.equal(found, whole[:, :, [7, 2, 9]])


def test_truncate_and_rows(kind: Kind) -> None:
    store = full_store()
    resident = kind(*store, budget=4, ring=1, capacity=20)
    slots = torch.tensor([3, 15, 16]).expand(ROWS, HEADS, 3).contiguous()
    _, misses = resident.look_up(slots, None)
    assert misses is not None
    resident.fill(misses, *entries(store, misses.slots))
    resident.truncate(10)
    assert held(resident) == [[{3}, {3}], [{3}, {3}]]
    resident.take_rows(torch.tensor([1, 1]))
    places, misses = resident.look_up(slots[..., :1], None)
    assert misses is None
    assert torch.equal(resident.gather(places)[0], store[0][[1, 1], :, 3:4])


@pytest.mark.parametrize("ring", [1, 4])
def test_ring_keeps_the_newest_only(kind: Kind, ring: int) -> None:
    store = full_store()
    resident = kind(*store, budget=2, ring=ring, capacity=20)
    for token in range(10):
        new = torch.full((ROWS, 1), token)
        resident.add_new(new, *(each[:, :, token : token + 1] for each in store))
    assert held(resident)[0][0] == set(range(10 - ring, 10))
