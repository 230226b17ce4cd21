"""Decoded tokens that a layer's running sums have not seen yet: sums of many at once cost less, and
tokens that are taken back at once leave no trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from infinigen_kv.rehearsal.statistics import PromptStatistics

MOST = 32  # tokens that wait when others come


class DecodedTokens(NamedTuple):
    """The Q new tokens of one forward, as `PromptStatistics.observe` takes them."""

    query: Tensor  # (B, H, Q, D)
    key: Tensor  # (B, H_kv, Q, D)
    value: Tensor  # (B, H_kv, Q, D_v)
    position: Tensor  # (B or 1, Q)
    weight: Tensor | None  # (B, Q)

    @property
    def tokens(self) -> int:
        """Q."""
        return self.key.shape[2]

    def first(self, count: int) -> DecodedTokens:
        """The oldest ``count`` of them."""
        some = slice(0, count)
        return DecodedTokens(
            self.query[:, :, some],
            self.key[:, :, some],
            self.value[:, :, some],
            self.position[:, some],
            None if self.weight is None else self.weight[:, some],
        )

    def rows(self, index: Tensor) -> DecodedTokens:
        """Those of the batch rows ``index``."""
        position, weight = self.position, self.weight
        if position.shape[0] > 1:
            position = position[index.to(position.device)]
        if weight is not None:
            weight = weight[index.to(weight.device)]
        index = index.to(self.key.device)
        return DecodedTokens(
            self.query[index], self.key[index], self.value[index], position, weight
        )

    def detached(self) -> DecodedTokens:
        """Without the graph that made them."""
        return DecodedTokens(
            self.query.detach(), self.key.detach(), self.value.detach(), self.position, self.weight
        )


class RecentTokens:
    """Tokens in the order of their forwards."""

    def __init__(self, forwards: Iterable[DecodedTokens] = ()) -> None:
        self._forwards = list(forwards)
        self._count = sum(each.tokens for each in self._forwards)

    @property
    def is_full(self) -> bool:
        """Whether those that are here are to be moved on before others come."""
        return self._count >= MOST

    def add(self, tokens: DecodedTokens) -> None:
        """Keep the tokens of a forward; their tensors are not copied."""
        graph = tokens.query.requires_grad or tokens.key.requires_grad or tokens.value.requires_grad
        self._forwards.append(tokens.detached() if graph else tokens)
        self._count += tokens.tokens

    def move_into(self, statistics: PromptStatistics) -> None:
        """Add the tokens to the sums, and forget them."""
        if not self._forwards:
            return
        forwards, self._forwards, self._count = self._forwards, [], 0
        rows = forwards[0].key.shape[0]
        weight = None
        if any(each.weight is not None for each in forwards):
            weight = torch.cat([_weight(each) for each in forwards], dim=1)
        statistics.observe(
            torch.cat([each.query for each in forwards], dim=2),
            torch.cat([each.key for each in forwards], dim=2),
            torch.cat([each.position.expand(rows, -1) for each in forwards], dim=1),
            weight,
            torch.cat([each.value for each in forwards], dim=2),
        )

    def drop(self, count: int) -> None:
        """Forget the newest ``count`` tokens, as far as they are still here."""
        while count > 0 and self._forwards:
            last = self._forwards.pop()
            if last.tokens > count:
                self._forwards.append(last.first(last.tokens - count))
            self._count -= min(count, last.tokens)
            count -= last.tokens

    def rows(self, index: Tensor) -> RecentTokens:
        """Those of the batch rows ``index``."""
        return RecentTokens(each.rows(index) for each in self._forwards)

    def copy(self) -> RecentTokens:
        """The same tokens, to be added to apart."""
        return RecentTokens(self._forwards)


def _weight(tokens: DecodedTokens) -> Tensor:
    """``(B, Q)`` float, 1 where every row's token counts."""
    if tokens.weight is not None:
        return tokens.weight.float()
    return torch.ones(tokens.key.shape[0], tokens.tokens, device=tokens.key.device)
