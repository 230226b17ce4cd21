"""Compiled arithmetic against PyTorch's casts and Python's `math`."""

from __future__ import annotations

import math
from types import ModuleType

import numba
import numpy as np
import pytest
import torch
from numba.core.dispatcher import Dispatcher
from torch import Tensor

from infinigen_kv.kernels.native import (
    attend,
    low_rank,
    numbers,
    partial_keys,
    resident,
    selecting,
    tail,
)
from infinigen_kv.kernels.native.arrays import as_array
from infinigen_kv.kernels.native.numbers import exponential, store, widen

EVERY_BFLOAT16 = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


@numba.njit
def widen_all(narrow, wide):  # type: ignore[no-untyped-def]
    for place in range(len(narrow)):
        wide[place] = widen(narrow[place])


@numba.njit
def store_all(numbers, target):  # type: ignore[no-untyped-def]
    for place in range(len(numbers)):
        store(target, place, numbers[place])


def stored(values: Tensor) -> Tensor:
    """``values`` float32 as bfloat16, by `store`."""
    target = torch.zeros(values.numel(), dtype=torch.bfloat16)
    store_all(values.numpy(), as_array(target))
    return target


def from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """NaN may have any payload, and zeros must have the right sign."""
    assert found.dtype == expected.dtype
    integers = {2: torch.int16, 4: torch.int32}[found.itemsize]
    nan = expected.isnan()
    return torch.equal(found.isnan(), nan) and torch.equal(
        found[~nan].view(integers), expected[~nan].view(integers)
    )


def test_every_bfloat16_widens_as_in_torch() -> None:
    found = torch.zeros(2**16)
    widen_all(as_array(EVERY_BFLOAT16), found.numpy())
    assert same_bits(found, EVERY_BFLOAT16.float())


def test_float32_widens_to_itself() -> None:
    values = torch.tensor([0.0, -0.0, 1e-42, -3.5, math.inf, -math.inf, math.nan])
    found = torch.zeros(7)
    widen_all(values.numpy(), found.numpy())
    assert same_bits(found, values)


def test_every_bfloat16_is_stored_unchanged() -> None:
    assert same_bits(stored(EVERY_BFLOAT16.float()), EVERY_BFLOAT16)


@pytest.mark.parametrize("lower_half", [0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_stored_numbers_are_rounded_as_in_torch(lower_half: int) -> None:
    """Just above each bfloat16, below, at and above the tie with the next, and just below that;
    denormal numbers, and those that round to infinity, among them.
    """
    values = from_bits((torch.arange(2**16) << 16) + lower_half)
    assert same_bits(stored(values), values.to(torch.bfloat16))


def test_ties_go_to_the_even_one() -> None:
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])
    assert stored(values).tolist() == [1, 1 + 2**-6, -1]


def test_random_numbers_are_stored_as_in_torch() -> None:
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0))
    values = from_bits(bits)
    assert same_bits(stored(values), values.to(torch.bfloat16))


def test_float32_is_stored_unchanged() -> None:
    values = torch.tensor([1.0000001, -0.0, math.nan, 3e-45])
    target = torch.zeros(4)
    store_all(values.numpy(), target.numpy())
    assert same_bits(target, values)


def test_exponential_is_close() -> None:
    for number in np.concatenate([np.linspace(-86.9, 0, 20_001), -np.logspace(-9, 1.9, 2_001)]):
        given = np.float32(number)
        expected = math.exp(float(given))
        error = abs(float(exponential(given)) - expected) / expected
        assert error < (1e-6 if given > -1 else 5e-6), given


def test_exponential_of_the_ends() -> None:
    assert exponential(np.float32(0)) == 1
    assert exponential(np.float32(-0.0)) == 1
    for far in (-87.5, -100, -1e30, -math.inf):
        assert exponential(np.float32(far)) == 0
    assert math.isnan(exponential(np.float32(math.nan)))


def test_compiled_code_is_kept_under_a_name_that_changes_with_its_folder() -> None:
    """Others inline what they import from it, and numba does not see that it changed."""
    assert exponential.py_func.__qualname__ == f"exponential_{numbers.STATE}"


@pytest.mark.parametrize("module", [attend, selecting, low_rank, partial_keys, resident, tail])
def test_compiled_code_inlines_nothing_from_another_folder(module: ModuleType) -> None:
    compiled = [each for each in vars(module).values() if isinstance(each, Dispatcher)]
    assert compiled
    for each in compiled:
        assert each.py_func.__module__.rpartition(".")[0] == numbers.__name__.rpartition(".")[0]
