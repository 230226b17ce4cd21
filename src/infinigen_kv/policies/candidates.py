"""What a step's selections choose from, and which of it they always keep.

Both classes here are `rehearsal.select.Candidates`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from infinigen_kv.config import InfiniGenConfig


class ForwardTokens(Protocol):
    """The tokens of one forward; a `policies.step.Step`, where each field is described."""

    start: int
    queries: int
    rows: int
    visible: Tensor | None
    position_ids: Tensor
    config: InfiniGenConfig

    @property
    def before(self) -> Tensor: ...

    @property
    def logical(self) -> Tensor: ...

    @property
    def exact_queries(self) -> Tensor: ...


class StepCandidates:
    """Allowed and always-kept tokens of a step (`rehearsal.select.Candidates`).

    With one query per row the candidates are the ``start`` cached tokens; with several, a query's
    candidates are all tokens before it, those of the same forward included.
    """

    def __init__(self, step: ForwardTokens) -> None:
        self._step = step
        self._single = step.queries == 1
        self.allowed = self._allowed()

    @property
    def tokens(self) -> int:
        """S, the tokens that scores are needed for."""
        return self._step.start if self._single else self._step.start + self._step.queries

    def mark_kept(self, margin: Tensor) -> None:
        config = self._step.config
        if self.allowed is None:
            if config.recent_tokens:
                margin[..., -config.recent_tokens :] = float("inf")
            margin[..., : config.sink_tokens] = float("inf")
        else:
            margin.masked_fill_(self._kept.to(margin.device), float("inf"))

    def bound(self, wanted: Tensor) -> Tensor:
        before, least, most, exact = (each.to(wanted.device) for each in self._limits)
        return torch.where(exact, before, torch.minimum(torch.maximum(wanted, least), most))

    @cached_property
    def limits(self) -> Tensor:
        before, least, most, exact = self._limits
        pairs = torch.stack(
            [torch.where(exact, before, least), torch.where(exact, before, most)], dim=-1
        )
        return pairs[:, 0].expand(self._step.rows, 2).contiguous()

    @cached_property
    def marks(self) -> Tensor | None:
        return None if self.allowed is None else _marks(self.allowed, self._kept)

    @property
    def ends(self) -> tuple[int, int]:
        return self._step.config.sink_tokens, self._step.config.recent_tokens

    @cached_property
    def _limits(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Real candidates, always-kept, largest count ``(B or 1, Q)``; queries that are exact."""
        step, config = self._step, self._step.config
        before = step.before
        least = before.clamp_max(config.recent_tokens + config.sink_tokens)
        share = (before * config.max_fetch).floor().long()
        return before, least, torch.maximum(share, least), step.exact_queries

    def _allowed(self) -> Tensor | None:
        step = self._step
        if self._single:
            return None if step.visible is None else step.visible[:, None, None, : step.start]
        index = torch.arange(self.tokens, device=step.position_ids.device)
        earlier = index < index[step.start :, None]
        if step.visible is None:
            return earlier[None, None]
        return earlier & step.visible[:, None, None, :]

    @cached_property
    def _kept(self) -> Tensor:
        """``(B or 1, 1, Q, S)``: sinks and the window of each query."""
        step, config = self._step, self._step.config
        logical = step.logical[:, None, None, : self.tokens]
        recent = logical >= step.before[:, None, :, None] - config.recent_tokens
        assert self.allowed is not None
        return self.allowed & (recent | (logical < config.sink_tokens))


class HeldCandidates:
    """As `StepCandidates`, for one query per row and a pool from which tokens were evicted.

    ``positions`` ``(B, S)`` says which token each of its slots holds.
    """

    def __init__(self, step: ForwardTokens, positions: Tensor) -> None:
        config = step.config
        real = step.visible
        positions = positions.to(step.position_ids.device)
        held = torch.ones_like(positions, dtype=torch.bool)
        if real is not None:
            held = real.gather(1, positions)
        logical = step.logical.expand(step.rows, -1).gather(1, positions)
        recent = logical >= step.before - config.recent_tokens
        kept = held & (recent | (logical < config.sink_tokens))
        self.allowed = None if real is None else held[:, None, None]
        self._kept = kept[:, None, None]
        self._exact = step.exact_queries
        self._held = held.sum(dim=1, keepdim=True)  # (B, 1)
        self._least = kept.sum(dim=1, keepdim=True)
        share = (self._held * config.max_fetch).floor().long()
        self._most = torch.maximum(share, self._least)

    @property
    def limits(self) -> Tensor:
        exact = self._exact.expand_as(self._held)
        pairs = [torch.where(exact, self._held, each) for each in (self._least, self._most)]
        return torch.cat(pairs, dim=1)

    @property
    def marks(self) -> Tensor | None:
        allowed = torch.ones_like(self._kept) if self.allowed is None else self.allowed
        return _marks(allowed, self._kept)

    @property
    def ends(self) -> tuple[int, int]:
        return 0, 0

    def mark_kept(self, margin: Tensor) -> None:
        margin.masked_fill_(self._kept.to(margin.device), float("inf"))

    def bound(self, wanted: Tensor) -> Tensor:
        limited = torch.minimum(
            torch.maximum(wanted, self._least.to(wanted.device)), self._most.to(wanted.device)
        )
        return torch.where(self._exact.to(wanted.device), self._held.to(wanted.device), limited)


def _marks(allowed: Tensor, kept: Tensor) -> Tensor:
    """``(B, S)`` bytes of the booleans ``(B, 1, 1, S)``; see `rehearsal.select.Candidates`."""
    return (allowed.to(torch.uint8) + kept.to(torch.uint8)).flatten(1).contiguous()
