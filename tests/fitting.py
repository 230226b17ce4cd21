"""Random tokens of one layer, and their sums."""

from __future__ import annotations

import torch
from torch import Tensor

from infinigen_kv.rehearsal.statistics import Moments

HEADS, KV_HEADS, DIM = 4, 2, 8


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mixed(seed: int, rows: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values whose directions differ in weight; keys have an offset."""
    turn = random(seed + 100, 3, 1, 1, DIM, DIM)
    query = random(seed, rows, HEADS, count, DIM) @ turn[0]
    keys = random(seed + 1, rows, KV_HEADS, count, DIM) @ turn[1] + 2 * turn[2][..., :1, :]
    values = keys @ turn[2] + random(seed + 2, rows, KV_HEADS, count, DIM)
    return query, keys, values


def moments_of(query: Tensor, keys: Tensor, values: Tensor, start: int = 0) -> Moments:
    moments = Moments.start(keys, values)
    position = torch.arange(start, start + keys.shape[2])[None]
    moments.observe(query, keys, position, None, values)
    return moments
