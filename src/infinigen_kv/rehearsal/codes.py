"""Partial keys in few bits: each dimension of a group of 64 tokens as codes on a grid of its own.

A code c stands for ``low + c step``; ``low`` and ``step`` are those of the group and dimension, in
bfloat16, which costs half a bit a number. As KIVI codes keys, with fewer bits for the later
dimensions: a projection's dimensions come in the order of how much they tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 64  # tokens that share a grid
MIN_STEP = 1e-30  # of a step, where numbers do not vary


class CodeLayout(NamedTuple):
    """How many dimensions have codes of 4, of 3 and of 2 bits, in this order.

    A group's codes are one line of bytes, in three sections. In each the tokens of a dimension are
    spread so that neighbouring bytes hold neighbouring tokens:

    - of 4 bits: 32 bytes a dimension; byte j holds the tokens j and j + 32, the latter above;
    - of 3 and 2 bits: 16 bytes a dimension for the two lower bits; byte j holds the tokens j, j +
      16, j + 32 and j + 48;
    - of 3 bits: 8 bytes a dimension for the upper bit; byte j holds the tokens j, j + 8, ...
    """

    fours: int
    threes: int
    twos: int

    @classmethod
    def of(cls, widths: Sequence[tuple[int, int]]) -> CodeLayout:
        """Of pairs of bits and how many dimensions have them."""
        count = {bits: sum(dims for each, dims in widths if each == bits) for bits in (4, 3, 2)}
        return cls(count[4], count[3], count[2])

    @property
    def rank(self) -> int:
        """R."""
        return sum(self)

    @property
    def line(self) -> int:
        """Bytes of one group's codes."""
        return GROUP // 8 * (4 * self.fours + 3 * self.threes + 2 * self.twos)

    def levels(self, device: torch.device) -> Tensor:
        """The highest code of each dimension, ``(R,)`` float32."""
        highest = [15.0] * self.fours + [7.0] * self.threes + [3.0] * self.twos
        return torch.tensor(highest, device=device)


def encode(numbers: Tensor, layout: CodeLayout) -> tuple[Tensor, Tensor]:
    """Codes of partial keys, tokens last.

    Parameters
    ----------
    numbers
        ``(..., R, n * 64)``.

    Returns
    -------
    codes
        ``(..., n, layout.line)`` uint8, see `CodeLayout`.
    grids
        ``(..., n, 2, R)`` bfloat16: ``low`` and ``step``.
    """
    grouped = numbers.float().unflatten(-1, (-1, GROUP)).movedim(-2, -3)  # (..., n, R, 64)
    levels = layout.levels(numbers.device)
    low, high = grouped.aminmax(dim=-1)  # (..., n, R)
    low = low.bfloat16()
    step = ((high - low.float()) / levels).bfloat16()
    # by the rounded grid, so that its rounding does not shift what is read
    above = grouped - low.float().unsqueeze(-1)
    steps = (above / step.float().clamp_min(MIN_STEP).unsqueeze(-1)).round()
    codes = steps.clamp_min(0).minimum(levels.unsqueeze(-1)).to(torch.uint8)
    return _pack(codes, layout), torch.stack([low, step], dim=-2)


def decode(codes: Tensor, grids: Tensor, layout: CodeLayout) -> Tensor:
    """What `encode`'s codes and grids stand for, ``(..., R, n * 64)`` float32."""
    low, step = grids.float().unbind(-2)  # (..., n, R)
    numbers = _unpack(codes, layout).float() * step.unsqueeze(-1) + low.unsqueeze(-1)
    return numbers.movedim(-3, -2).flatten(-2)


def _pack(codes: Tensor, layout: CodeLayout) -> Tensor:
    """Codes ``(..., R, 64)`` as lines ``(..., layout.line)``."""
    fours, threes = layout.fours, layout.threes
    lower = codes[..., fours:, :] & 3
    upper = codes[..., fours : fours + threes, :] >> 2
    sections = (_merge(codes[..., :fours, :], 4), _merge(lower, 2), _merge(upper, 1))
    return torch.cat([each.flatten(-2) for each in sections], dim=-1)


def _unpack(lines: Tensor, layout: CodeLayout) -> Tensor:
    """Back to codes ``(..., R, 64)``."""
    fours, threes, twos = layout
    bounds = [fours * 32, (threes + twos) * 16, threes * 8]
    nibbles, pairs, singles = lines.split(bounds, dim=-1)
    lower = _spread(pairs, threes + twos, 2)
    upper = _spread(singles, threes, 1) << 2
    wide = lower[..., :threes, :] | upper
    return torch.cat([_spread(nibbles, fours, 4), wide, lower[..., threes:, :]], dim=-2)


def _merge(codes: Tensor, bits: int) -> Tensor:
    """Codes ``(..., dims, 64)`` of so many bits as bytes ``(..., dims, 8 * bits)``."""
    parts = codes.unflatten(-1, (8 // bits, 8 * bits)).unbind(-2)
    merged = parts[0]
    for place, part in enumerate(parts[1:], start=1):
        merged = merged | (part << (place * bits))
    return merged


def _spread(lines: Tensor, dims: int, bits: int) -> Tensor:
    """Back from ``(..., dims * 8 * bits)`` bytes to codes ``(..., dims, 64)``."""
    merged = lines.unflatten(-1, (dims, 8 * bits))
    mask = (1 << bits) - 1
    parts = [(merged >> (place * bits)) & mask for place in range(8 // bits)]
    return torch.stack(parts, dim=-2).flatten(-2)
