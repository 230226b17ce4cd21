"""Decoded tokens that a layer's running sums have not seen yet: sums of many at once cost less."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from infinigen_kv.rehearsal.statistics import PromptStatistics

MOST = 32  # tokens that wait


@dataclass(frozen=True, slots=True)
class DecodedToken:
    """One new token of each row, as `PromptStatistics.observe` takes it."""

    query: Tensor  # (B, H, 1, D)
    key: Tensor  # (B, H_kv, 1, D)
    value: Tensor  # (B, H_kv, 1, D_v)
    position: Tensor  # (B or 1, 1)
    weight: Tensor | None  # (B, 1)


@dataclass(slots=True)
class RecentTokens:
    """Tokens in the order of their decode steps."""

    _tokens: list[DecodedToken] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """Whether it is time to move them on."""
        return len(self._tokens) >= MOST

    def add(self, token: DecodedToken) -> None:
        """Keep a token; its tensors are not copied."""
        self._tokens.append(token)

    def move_into(self, statistics: PromptStatistics) -> None:
        """Add the tokens to the sums, and forget them."""
        if not self._tokens:
            return
        tokens, self._tokens = self._tokens, []
        rows = tokens[0].key.shape[0]
        weight = None
        if any(each.weight is not None for each in tokens):
            weight = torch.cat([_weight(each) for each in tokens], dim=1)
        statistics.observe(
            torch.cat([each.query for each in tokens], dim=2),
            torch.cat([each.key for each in tokens], dim=2),
            torch.cat([each.position.expand(rows, 1) for each in tokens], dim=1),
            weight,
            torch.cat([each.value for each in tokens], dim=2),
        )

    def drop(self, count: int) -> None:
        """Forget the newest ``count`` tokens, as far as they are still here."""
        if count > 0:
            del self._tokens[-count:]

    def rows(self, index: Tensor) -> RecentTokens:
        """Those of the batch rows ``index``."""
        return RecentTokens([_rows(each, index) for each in self._tokens])

    def copy(self) -> RecentTokens:
        """The same tokens, to be added to apart."""
        return RecentTokens(list(self._tokens))


def _weight(token: DecodedToken) -> Tensor:
    """``(B, 1)`` float, 1 where every row's token counts."""
    if token.weight is not None:
        return token.weight.float()
    return torch.ones(token.key.shape[0], 1, device=token.key.device)


def _rows(token: DecodedToken, index: Tensor) -> DecodedToken:
    position = token.position
    if position.shape[0] > 1:
        position = position[index.to(position.device)]
    weight = None if token.weight is None else token.weight[index.to(token.weight.device)]
    index = index.to(token.key.device)
    return DecodedToken(token.query[index], token.key[index], token.value[index], position, weight)
