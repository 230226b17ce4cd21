"""Codes of few bits, read one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fitting import random
from infinigen_kv.rehearsal.codes import GROUP, CodeLayout, decode, encode

LAYOUTS = [CodeLayout(3, 2, 4), CodeLayout(5, 0, 0), CodeLayout(0, 3, 0), CodeLayout(0, 0, 2)]


def one_code(line: Tensor, layout: CodeLayout, dim: int, token: int) -> int:
    """From the bytes of a group, as `CodeLayout` describes them."""
    data = line.tolist()
    if dim < layout.fours:
        return data[32 * dim + token % 32] >> 4 * (token // 32) & 15
    place = 32 * layout.fours
    low = data[place + 16 * (dim - layout.fours) + token % 16] >> 2 * (token // 16) & 3
    if dim >= layout.fours + layout.threes:
        return low
    place += 16 * (layout.threes + layout.twos)
    high = data[place + 8 * (dim - layout.fours) + token % 8] >> token // 8 & 1
    return low + 4 * high


def bits_of(layout: CodeLayout) -> list[int]:
    return [4] * layout.fours + [3] * layout.threes + [2] * layout.twos


@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_are_the_nearest_points_of_the_grid(layout: CodeLayout) -> None:
    numbers = random(1, 2, layout.rank, 2 * GROUP) * torch.tensor([1e-3, 1e3])[:, None, None] + 5
    codes, grids = encode(numbers, layout)
    read = decode(codes, grids, layout)
    assert read.shape == numbers.shape and read.dtype == torch.float32
    for row in range(2):
        for dim, bits in enumerate(bits_of(layout)):
            for group in range(2):
                low, step = grids[row, group, :, dim].double().tolist()
                grid = [low + code * step for code in range(2**bits)]
                for token in range(GROUP):
                    number = numbers[row, dim, group * GROUP + token].double().item()
                    code = one_code(codes[row, group], layout, dim, token)
                    nearest = min(abs(number - each) for each in grid)
                    assert abs(number - grid[code]) <= nearest + 1e-5 * abs(number)
                    found = read[row, dim, group * GROUP + token].item()
                    assert found == pytest.approx(grid[code], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_grid_spans_the_group(layout: CodeLayout) -> None:
    numbers = random(2, layout.rank, GROUP)
    _, grids = encode(numbers, layout)
    low, step = grids[0].double()
    top = torch.tensor([2**bits - 1 for bits in bits_of(layout)])
    span = numbers.amax(1).double() - numbers.amin(1).double()
    # bfloat16 has eight bits
    assert (low - numbers.amin(1)).abs().max() < 2**-8 * numbers.abs().max()
    assert ((low + step * top - numbers.amax(1)).abs() < 2**-7 * (span + low.abs())).all()


def test_bytes_are_those_of_the_bits() -> None:
    for layout in LAYOUTS:
        codes, grids = encode(random(3, layout.rank, 3 * GROUP), layout)
        assert codes.nbytes == 3 * GROUP * sum(bits_of(layout)) // 8
        assert grids.nbytes == 3 * 2 * 2 * layout.rank


def test_numbers_that_do_not_vary_are_kept() -> None:
    layout = CodeLayout(1, 1, 1)
    for number in (0.0, 1.0, -2.5):
        numbers = torch.full((3, GROUP), number)
        assert torch.equal(decode(*encode(numbers, layout), layout), numbers)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(odd: float) -> None:
    layout = CodeLayout(1, 1, 1)
    numbers = random(4, 3, 2 * GROUP)
    numbers[:, 70] = odd
    read = decode(*encode(numbers, layout), layout)
    assert not bool(read[:, 70].isfinite().any())
    assert bool(read[:, :GROUP].isfinite().all())
