"""What one forward of the model knows before its layers run; shared by all of them."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from infinigen_kv.policies.candidates import StepCandidates

if TYPE_CHECKING:
    from infinigen_kv.config import InfiniGenConfig
    from infinigen_kv.models.adapters.base import Adapter
    from infinigen_kv.models.adapters.layer_spec import LayerSpec
    from infinigen_kv.rehearsal.select import Selection
    from infinigen_kv.storage.pools.pool import Pool

Rotary = tuple[Tensor, Tensor] | None


class Recorder(Protocol):
    """Sees what each layer attended to; see `infinigen_kv.cache.recorder`."""

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
    drafts
        Whether its tokens may be taken back by assisted decoding.
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
        drafts: bool = False,
    ) -> None:
        self.prompt_ends = prompt_ends
        self.drafts = drafts
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
