"""Rotation of a query by its position."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions in the split-halves layout, which every rotary family here uses.

    Dimension j turns with dimension j + r/2, where r is the number of rotary dimensions; those
    from r on stay as they are (partial rotary embedding).

    Parameters
    ----------
    heads : Tensor of shape (B, H, Q, D)
    cos, sin : Tensors of shape (B, Q, r) or (1, Q, r), r <= D

    Returns
    -------
    Tensor of shape (B, H, Q, D)
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, Q, r)
    size = cos.shape[-1]
    if size == heads.shape[-1]:
        return heads * cos + _turned(heads) * sin
    turning, still = heads[..., :size], heads[..., size:]
    return torch.cat((turning * cos + _turned(turning) * sin, still), dim=-1)


def _turned(heads: Tensor) -> Tensor:
    """Every pair (a, b) of dimensions as (-b, a)."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
