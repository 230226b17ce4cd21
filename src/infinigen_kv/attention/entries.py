"""Entries of one step on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Entries(NamedTuple):
    """Keys and values ``(B, H_kv, n or more, D)`` on the device, and which of them are meant.

    ``places`` ``(B, H_kv, n)``; None for all, in order. An attention can read them where they
    lie. Valid until the pool that gave them changes.
    """

    keys: Tensor
    values: Tensor
    places: Tensor | None

    def gather(self) -> tuple[Tensor, Tensor]:
        """The meant keys and values ``(B, H_kv, n, D)``."""
        if self.places is None:
            return self.keys, self.values
        return _take(self.keys, self.places), _take(self.values, self.places)


def _take(vectors: Tensor, places: Tensor) -> Tensor:
    """One `index_select` over a flat view: on a CPU several times faster than `torch.gather`."""
    rows, heads, count, width = vectors.shape
    offsets = torch.arange(rows * heads, device=vectors.device).view(rows, heads, 1) * count
    flat = vectors.view(-1, width).index_select(0, (places + offsets).view(-1))
    return flat.view(rows, heads, places.shape[2], width)
