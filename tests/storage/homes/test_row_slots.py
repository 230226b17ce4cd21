"""Slots of a batch against one map for each row."""

from __future__ import annotations

import pytest
import torch

from infinigen_kv.errors import CacheStateError
from infinigen_kv.storage.homes.row_slots import RowSlots
from infinigen_kv.storage.homes.slots import SlotMap

CAPACITY = 5


def test_every_row_follows_a_map_of_its_own() -> None:
    slots = RowSlots(2, CAPACITY, "counter", sinks=1)
    maps = [SlotMap(CAPACITY, "counter", sinks=1) for _ in range(2)]
    slots.set_padding([0, 2])
    maps[1].padding = 2
    assert slots.add(4).tolist() == [each.add(4).tolist() for each in maps]
    assert slots.positions is None and slots.free == 1 and slots.sinks == 1
    fetched = torch.tensor([[[0, 3, 1], [2, 3, 1]], [[1, 0, 2], [3, 1, 2]]])  # (B, H_kv, n)
    meant = torch.tensor([[[True, True, False]], [[True, False, False]]])
    slots.touch(fetched, meant)
    for each, used in zip(maps, ([0, 2, 3], [1, 3]), strict=True):
        each.touch(torch.tensor(used).numpy())
    for count in (2, 1, 3):
        assert slots.add(count).tolist() == [each.add(count).tolist() for each in maps]
    slots.touch(fetched, None)
    for each, used in zip(maps, ([0, 1, 2, 3], [0, 1, 2, 3]), strict=True):
        each.touch(torch.tensor(used).numpy())
    assert slots.add(1).tolist() == [each.add(1).tolist() for each in maps]
    assert slots.tokens_seen == 11 and slots.free == 0
    assert slots.positions is not None
    assert slots.positions.tolist() == [each.positions.tolist() for each in maps]


def test_rows_that_are_repeated_go_their_own_way() -> None:
    slots = RowSlots(2, CAPACITY, "lru")
    slots.add(5)
    slots.take_rows(torch.tensor([1, 1, 0]))
    for row, used in enumerate((0, 1, 2)):  # the least recently used are the others
        others = torch.tensor([each for each in range(5) if each != used])
        slots.touch(
            others.expand(3, 1, -1), (torch.arange(3) == row)[:, None, None].expand(3, 1, 4)
        )
    assert slots.add(1).tolist() == [[0], [1], [2]]


def test_tokens_go_back_until_one_is_evicted() -> None:
    slots = RowSlots(2, CAPACITY, "fifo")
    slots.add(5)
    slots.truncate(3)
    assert slots.tokens_seen == 3 and slots.free == 2
    slots.add(3)
    with pytest.raises(CacheStateError, match=f"capacity of {CAPACITY}"):
        slots.truncate(4)
