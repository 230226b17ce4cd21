"""What one forward of the model knows before its layers run; shared by all of them."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from infinigen_kv.adapters.base import Adapter, LayerSpec
    from infinigen_kv.config import InfiniGenConfig
    from infinigen_kv.pool.pool import Pool
    from infinigen_kv.rehearsal.select import Selection

Rotary = tuple[Tensor, Tensor] | None


class Recorder(Protocol):
    """Sees what each layer attended to; see `infinigen_kv.recorder`."""

    needs_scores: bool
    needs_keys: bool

    def see(
        self,
        spec: LayerSpec,
        query: Tensor,
        keys: Tensor,
        step: Step,
        pool: Pool,
        selection: Selection | None,
    ) -> None:
        """What a layer is about to attend to, where ``needs_keys``.

        ``query`` ``(B, H, Q, D)`` and ``keys`` ``(B, H_kv, Q, D)`` are those of the new tokens,
        which the pool does not hold yet. ``selection`` is None for everything that it holds, and
        for what several queries will choose.
        """

    def record(
        self, layer: int, step: Step, selection: Selection | None, scores: Tensor | None
    ) -> None:
        """One layer of one forward.

        ``selection`` is None where attention was exact. ``scores`` ``(B, H_kv, G, Q, S)`` are the
        true ones, given where ``needs_scores`` and a forward with several queries selects.
        """


class Step:
    """One forward: Q new tokens on top of ``start`` cached ones, in B rows.

    Parameters
    ----------
    start, queries
        Tokens cached before this forward (padding included) and new tokens.
    visible
        ``(B, start + queries)`` boolean, False for padding; None where there is none.
    position_ids
        ``(B or 1, Q)`` as the model uses them.
    selecting
        Whether layers may attend to a selection; otherwise attention is exact.
    recorder
        Told what each layer attends to, or None.
    prompt_ends
        Whether a prompt ends with this forward; None if nobody said.
    """

    def __init__(
        self,
        *,
        start: int,
        queries: int,
        rows: int,
        visible: Tensor | None,
        position_ids: Tensor,
        selecting: bool,
        config: InfiniGenConfig,
        recorder: Recorder | None = None,
        prompt_ends: bool | None = None,
    ) -> None:
        self.prompt_ends = prompt_ends
        self.start = start
        self.queries = queries
        self.rows = rows
        self.visible = visible
        self.position_ids = position_ids
        self.config = config
        self.recorder = recorder
        self.selecting = selecting and self._some_query_is_long()
        self._rotary: dict[Hashable, Rotary] = {}

    @property
    def may_end_prompt(self) -> bool:
        """Whether this forward is exact, and a prompt's last as far as is known."""
        if self.selecting:
            return False
        return self.queries > 1 if self.prompt_ends is None else self.prompt_ends

    @cached_property
    def before(self) -> Tensor:
        """Real tokens before each query in its row, ``(B or 1, Q)`` int64."""
        if self.visible is None:
            return torch.arange(
                self.start, self.start + self.queries, device=self.position_ids.device
            )[None]
        return self.logical[:, self.start :]

    @cached_property
    def logical(self) -> Tensor:
        """Real tokens before each token in its row, ``(B or 1, start + Q)`` int64."""
        if self.visible is None:
            total = self.start + self.queries
            return torch.arange(total, device=self.position_ids.device)[None]
        counted = self.visible.long()
        return counted.cumsum(dim=1) - counted

    @cached_property
    def padding(self) -> list[int] | None:
        """Tokens before the first real one in each row, None where there is no padding."""
        if self.visible is None:
            return None
        return (self.visible.cumsum(dim=1) == 0).sum(dim=1).tolist()

    @cached_property
    def new_weight(self) -> Tensor | None:
        """``(B, Q)`` float, 0 for new tokens that are padding, None where there are none."""
        return None if self.visible is None else self.visible[:, self.start :].float()

    @cached_property
    def exact_queries(self) -> Tensor:
        """``(B or 1, Q)`` boolean: queries too early in their row for a selection."""
        return self.before < self.config.min_context

    @cached_property
    def some_query_is_exact(self) -> bool:
        """Whether any query of a selecting step still attends to everything."""
        return bool(self.exact_queries.any())

    @cached_property
    def exact_weight(self) -> Tensor:
        """``(B, Q)`` float: `new_weight`, and 0 for queries that select."""
        exact = self.exact_queries.float().expand(self.rows, self.queries)
        return exact if self.new_weight is None else exact * self.new_weight

    @cached_property
    def selecting_rows(self) -> tuple[bool, ...]:
        """Whether each row has a query that selects."""
        if not self.selecting:
            return (False,) * self.rows
        selects = (~self.exact_queries).any(dim=1).expand(self.rows)
        return tuple(selects.tolist())

    @cached_property
    def length_after(self) -> Tensor:
        """Real tokens in each row once this forward is over, ``(B or 1,)`` int64."""
        if self.visible is None:
            return self.before[:, -1] + 1
        return self.visible.sum(dim=1)

    @cached_property
    def candidates(self) -> StepCandidates:
        """What this step's selections choose from."""
        return StepCandidates(self)

    def release(self) -> None:
        """The forward is over: drop the candidates, which refer back here, so that what both hold
        goes at once. Left to the garbage collector it would pile up between large tensors.
        """
        self.__dict__.pop("candidates", None)

    def rotary(self, adapter: Adapter, index: int, hidden: Tensor) -> Rotary:
        """Cosines and sines of layer ``index`` at this step's positions, computed once per kind."""
        key = (adapter.rotary_key(index), hidden.device)
        if key not in self._rotary:
            positions = self.position_ids.to(hidden.device)
            self._rotary[key] = adapter.rotary(index, hidden, positions)
        return self._rotary[key]

    def _some_query_is_long(self) -> bool:
        last = self.start + self.queries - 1
        if last < self.config.min_context:
            return False
        return self.visible is None or not bool(self.exact_queries.all())


class StepCandidates:
    """Allowed and always-kept tokens of a step (`rehearsal.select.Candidates`).

    With one query per row the candidates are the ``start`` cached tokens; with several, a query's
    candidates are all tokens before it, those of the same forward included.
    """

    def __init__(self, step: Step) -> None:
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

    def __init__(self, step: Step, positions: Tensor) -> None:
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
