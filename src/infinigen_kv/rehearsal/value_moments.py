"""Sums over values, from which a layer guesses those that a step leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueMoments:
    """First moments of values, and second ones with centred keys; values about ``shift``."""

    shift: Tensor  # (B, H_kv, 1, D_v)
    total: Tensor  # (B, H_kv, 1, D_v)
    products: Tensor  # (B, H_kv, D, D_v)

    @classmethod
    def start(cls, key: Tensor, value: Tensor) -> ValueMoments:
        """Empty sums for keys and values like these."""
        batch, heads, _, width = value.shape
        row = torch.zeros(batch, heads, 1, width, device=key.device)
        products = torch.zeros(batch, heads, key.shape[3], width, device=key.device)
        return cls(row, row.clone(), products)

    def with_tokens(
        self, value: Tensor, centred: Tensor, weights: Tensor, first: Tensor
    ) -> ValueMoments:
        """With tokens of these values ``(B, H_kv, Q, D_v)``, centred and weighted keys ``(B, H_kv,
        Q, D)`` and weights ``(B, 1, Q, 1)``, in rows that have none yet where ``first``.
        """
        values = value.float()
        mean = weights.mT @ values / weights.sum(2, keepdim=True).clamp_min(1)
        shift = torch.where(first, mean, self.shift)
        values = values - shift
        total = self.total + weights.mT @ values
        return ValueMoments(shift, total, self.products + centred.mT @ values)

    def emptied(self) -> ValueMoments:
        """Of no tokens."""
        parts = self.shift, self.total, self.products
        return ValueMoments(*(torch.zeros_like(part) for part in parts))

    def rows(self, index: Tensor) -> ValueMoments:
        """The sums of the batch rows ``index``."""
        return ValueMoments(self.shift[index], self.total[index], self.products[index])
