"""The home in memory against plain concatenation."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from infinigen_kv.storage.homes.unpacked import UnpackedHome

HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5  # keys and values of different widths


def entries(rows: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, HEADS, count, KEY_DIM, generator=generator),
        torch.randn(rows, HEADS, count, VALUE_DIM, generator=generator),
    )


class HomeMachine(RuleBasedStateMachine):
    """Random operations on a home and on plain tensors ``keys``, ``values``."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = entries(2, 0, seed=0)
        self.home = UnpackedHome(self.keys, self.values)

    @rule(count=st.sampled_from([1, 2, 7, 200, 300]), seed=st.integers(0, 999))
    def append(self, count: int, seed: int) -> None:
        new_keys, new_values = entries(len(self.keys), count, seed)
        self.home.append(new_keys, new_values)
        self.keys = torch.cat([self.keys, new_keys], dim=2)
        self.values = torch.cat([self.values, new_values], dim=2)
        new_keys.zero_()  # the home must not hold on to what it was given
        new_values.zero_()

    @rule(length=st.integers(0, 700))
    def truncate(self, length: int) -> None:
        self.home.truncate(length)
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]

    @rule(data=st.data())
    def take_rows(self, data: st.DataObject) -> None:
        places = st.integers(0, len(self.keys) - 1)
        index = torch.tensor(data.draw(st.lists(places, min_size=1, max_size=3)))
        self.home.take_rows(index)
        self.keys, self.values = self.keys[index], self.values[index]

    @precondition(lambda self: self.keys.shape[2] > 0)
    @rule(count=st.integers(0, 5), seed=st.integers(0, 999))
    def gather(self, count: int, seed: int) -> None:
        rows, heads, length, _ = self.keys.shape
        slots = torch.randint(
            0, length, (rows, heads, count), generator=torch.Generator().manual_seed(seed)
        )
        keys, values = self.home.gather(slots)
        assert torch.equal(keys, self.keys.take_along_dim(slots[..., None], dim=2))
        assert torch.equal(values, self.values.take_along_dim(slots[..., None], dim=2))

    @invariant()
    def content_is_the_same(self) -> None:
        assert (self.home.rows, self.home.length) == (len(self.keys), self.keys.shape[2])
        keys, values = self.home.all()
        assert torch.equal(keys, self.keys)
        assert torch.equal(values, self.values)


HomeMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestUnpackedHome = HomeMachine.TestCase


def test_capacity_is_reserved_at_once_for_keys_and_values() -> None:
    keys, values = entries(2, 4, seed=1)
    home = UnpackedHome(keys.bfloat16(), values, capacity=1000)
    assert home.nbytes == 2 * HEADS * 1000 * (KEY_DIM * 2 + VALUE_DIM * 4)
    assert home.length == 0
    home.append(keys.bfloat16(), values)
    assert home.all()[0].dtype == torch.bfloat16
    assert home.all()[1].dtype == torch.float32
