"""Yes or no of the last queries, packed into whole numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WORD = 62  # bits used of an int64, so that neither shifts nor sums reach its sign
_FULL = (1 << WORD) - 1
_PAIRS, _NIBBLES, _BYTES = (
    int.from_bytes(bytes([pattern]) * 8, "little", signed=True) for pattern in (0x55, 0x33, 0x0F)
)
_ONES = int.from_bytes(bytes([1]) * 8, "little")


def words_for(queries: int) -> int:
    """Numbers that hold the bits of so many queries."""
    return -(-queries // WORD)


def push(words: Tensor, bits: Tensor, queries: int) -> Tensor:
    """Shift the bits of some more queries in, and those beyond the last ``queries`` out.

    Parameters
    ----------
    words
        ``(..., n, W)`` int64, the newest query in the lowest bit of the first.
    bits
        ``(..., Q, n)`` boolean, the newest query last.

    Returns
    -------
    Tensor
        Like ``words``.
    """
    count = words.shape[-1]
    shifted = _shifted(words, bits.shape[-2])
    for place in range(min(count, words_for(bits.shape[-2]))):
        end = bits.shape[-2] - place * WORD
        part = bits[..., max(0, end - WORD) : end, :].flip(-2).long()
        order = torch.arange(part.shape[-2], device=bits.device).unsqueeze(1)
        shifted[..., place] |= (part << order).sum(dim=-2)
    shifted[..., -1] &= (1 << (queries - (count - 1) * WORD)) - 1
    return shifted


def ones(words: Tensor) -> Tensor:
    """How many bits of ``(..., W)`` are set: ``(...)`` int64."""
    found = words - ((words >> 1) & _PAIRS)
    found = (found & _NIBBLES) + ((found >> 2) & _NIBBLES)
    found = (found + (found >> 4)) & _BYTES
    return ((found * _ONES) >> 56).sum(dim=-1)


def _shifted(words: Tensor, queries: int) -> Tensor:
    count = words.shape[-1]
    whole, rest = divmod(queries, WORD)
    moved = F.pad(words, (min(whole, count), 0))[..., :count]
    if rest == 0:
        return moved.clone()
    carry = F.pad(moved >> (WORD - rest), (1, 0))[..., :count]
    return ((moved << rest) & _FULL) | carry
