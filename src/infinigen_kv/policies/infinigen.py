"""InfiniGen: rehearse the layer's scores from the previous layer's input, move what matters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infinigen_kv.attention import grouped_scores
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.policies.base import Policy
from infinigen_kv.pool import TokenBuffer
from infinigen_kv.pool.pool import Pool
from infinigen_kv.rehearsal.select import Candidates, Selection, choose, group_margin
from infinigen_kv.rehearsal.statistics import Magnitudes, Moments, Projection, PromptStatistics
from infinigen_kv.step import HeldCandidates, Step

LAST_QUERIES = 16  # of a prompt; they tell best what the first steps will want
SPARE_TOKENS = 512  # room for appends before a partial-key buffer has to grow

PredictQuery = Callable[[Tensor, Step], Tensor]
"""``(hidden (B, Q, M), step) -> (B, H, Q, D)``: this layer's query from the previous layer."""


@dataclass(frozen=True, slots=True)
class RehearsalLayer:
    """What the rehearsal of one layer needs from the model and its calibration."""

    predict_query: PredictQuery
    skew: Tensor | None
    """``(H_kv, D, D)`` for the paper's rehearsal, None for the calibrated one."""
    scaling: float
    softcap: float | None

    def __deepcopy__(self, memo: dict[int, Any]) -> RehearsalLayer:
        """The same one: copies of a cache share the model's weights."""
        return self


class InfiniGenPolicy(Policy):
    """Speculative selection with partial keys kept on the device.

    Prompt statistics grow while the layer attends in full. Of a prompt read in one forward they
    become a `Projection`, and its keys partial keys, as soon as it passes. After a prompt in chunks
    or a later turn the first step that selects does that, with the keys that the pool returns.
    """

    def __init__(self, layer: RehearsalLayer, config: InfiniGenConfig) -> None:
        self._layer = layer
        self._config = config
        self._forget()

    def _forget(self) -> None:
        self._statistics: PromptStatistics | None = None
        self._projection: Projection | None = None
        self._partial_keys: TokenBuffer | None = None
        self._fitted: tuple[bool, ...] = ()
        self._pending_query: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._partial_keys is None else self._partial_keys.nbytes

    def rehearse(self, hidden: Tensor, step: Step, pool: Pool) -> Selection | None:
        query = self._layer.predict_query(hidden, step)
        if step.queries > 1:
            self._pending_query = query
            return None
        self._fit(step, pool)
        return choose(self._scores(query), _candidates(step, pool), self._config.alpha)

    def observe(
        self, query: Tensor, keys: Tensor, step: Step, pool: Pool, slots: Tensor | None
    ) -> None:
        if not step.selecting:
            self._accumulate(query, keys, step, step.new_weight)
            self._fitted = ()  # the partial keys are behind: fit again when selection resumes
            if step.start == 0 and step.queries > 1:
                self._fit_prompt(keys, step, slots)
            return
        if step.some_query_is_exact:
            self._accumulate(query, keys, step, step.exact_weight)
        # among several queries those that select learn from the exact ones before them
        if step.queries > 1 and self._fit(step, pool):
            return
        assert self._projection is not None and self._partial_keys is not None
        partial = self._projection.partial_keys(keys)
        if slots is None:
            self._partial_keys.extend(keys.shape[2]).copy_(partial)
        else:
            self._partial_keys.write(slots, partial)

    def select(self, step: Step, pool: Pool) -> Selection | None:
        assert self._pending_query is not None
        scores = self._scores(self._pending_query)
        self._pending_query = None
        return choose(scores, step.candidates, self._config.alpha)

    def likely(self, count: int, query: Tensor, keys: Tensor, step: Step) -> Tensor | None:
        """What the prompt's last queries would like best, by their true scores."""
        last = query[:, :, -LAST_QUERIES:]
        scores = grouped_scores(last, keys, self._layer.scaling, self._layer.softcap)
        if step.visible is not None:
            real = step.visible.to(scores.device)[:, None, None, None, :]
            scores = scores.masked_fill(~real, float("-inf"))
        wanted = group_margin(scores).amax(dim=2)  # (B, H_kv, T)
        return wanted.topk(min(count, wanted.shape[2]), dim=2).indices

    def truncate(self, length: int) -> None:
        if length == 0:
            self._forget()
        elif self._partial_keys is not None:
            self._partial_keys.truncate(length)

    def take_rows(self, index: Tensor) -> None:
        if self._statistics is not None:
            self._statistics = self._statistics.rows(index.to(self._statistics.device))
        if self._projection is not None:
            self._projection = self._projection.rows(index.to(self._projection.key.device))
        if self._partial_keys is not None:
            self._partial_keys.take_rows(index)
        self._fitted = tuple(self._fitted[row] for row in index.tolist()) if self._fitted else ()

    def _accumulate(self, query: Tensor, keys: Tensor, step: Step, weight: Tensor | None) -> None:
        if weight is not None:
            weight = weight.to(keys.device)
        if self._statistics is None:
            skew = self._layer.skew
            self._statistics = Moments.start(keys) if skew is None else Magnitudes.start(keys, skew)
        self._statistics.observe(query, keys, step.before.to(keys.device), weight)

    def _fit_prompt(self, keys: Tensor, step: Step, slots: Tensor | None) -> None:
        """Fit while a prompt's keys pass through the device, unpacked by no codec.

        Later chunks undo that, and the first step that selects fits again from the pool.
        """
        long = step.length_after >= self._config.min_context
        if not bool(long.any()):
            return
        assert self._statistics is not None
        self._projection = self._statistics.projection(self._config.partial_dim(keys.shape[3]))
        buffer = _partial_key_buffer(keys, self._projection)
        if slots is not None:  # the pool has dropped some of these tokens
            kept = _partial_key_buffer(keys[:, :, :0], self._projection)
            kept.write(slots, buffer.view())
            buffer = kept
        self._partial_keys = buffer
        self._fitted = tuple(long.expand(step.rows).tolist())

    def _fit(self, step: Step, pool: Pool) -> bool:
        """Choose the partial dimensions of the rows that newly select, and write partial keys of
        all that is in the pool. Returns False if no row does.
        """
        if self._fitted == step.selecting_rows:
            return False
        fitted = self._fitted or (False,) * step.rows
        missing = [
            wants and not done for wants, done in zip(step.selecting_rows, fitted, strict=True)
        ]
        if not any(missing):
            return False
        assert self._statistics is not None
        keys, _ = pool.all()
        new = self._statistics.projection(self._config.partial_dim(keys.shape[3]))
        if self._projection is not None:
            keep = torch.tensor([not each for each in missing], device=keys.device)
            new = new.with_rows(keep, self._projection)
        self._projection = new
        self._partial_keys = _partial_key_buffer(keys, new)
        self._fitted = tuple(a or b for a, b in zip(fitted, missing, strict=True))
        return True

    def _scores(self, query: Tensor) -> Tensor:
        """Rehearsed scores ``(B, H_kv, G, Q, S)`` of ``query`` ``(B, H, Q, D)``."""
        assert self._projection is not None and self._partial_keys is not None
        projection, keys = self._projection, self._partial_keys.view()
        rows, _, queries, dim = query.shape
        heads = keys.shape[1]
        grouped = query.reshape(rows, heads, -1, dim).float() * self._layer.scaling
        partial = (grouped @ projection.query).to(keys.dtype)
        scores = partial @ keys.mT  # (B, H_kv, G * Q, S)
        if self._layer.softcap is not None:  # the cap needs the scores' absolute height
            if projection.offset is not None:
                scores = scores + grouped @ projection.offset.mT
            scores = torch.tanh(scores / self._layer.softcap) * self._layer.softcap
        return scores.view(rows, heads, -1, queries, keys.shape[2])


def _candidates(step: Step, pool: Pool) -> Candidates:
    positions = pool.positions
    return step.candidates if positions is None else HeldCandidates(step, positions)


def _partial_key_buffer(keys: Tensor, projection: Projection) -> TokenBuffer:
    """Partial keys of all of ``keys`` ``(B, H_kv, T, D)``, with room to append."""
    rows, heads, tokens, _ = keys.shape
    buffer = TokenBuffer(
        rows,
        heads,
        projection.key.shape[-1],
        dtype=keys.dtype,
        device=keys.device,
        capacity=tokens + SPARE_TOKENS,
    )
    buffer.extend(tokens).copy_(projection.partial_keys(keys))
    return buffer
