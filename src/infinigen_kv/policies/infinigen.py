"""InfiniGen: rehearse the layer's scores from the previous layer's input, move what matters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infinigen_kv.attention import grouped_scores
from infinigen_kv.candidates import HeldCandidates
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.kernels import Kernels
from infinigen_kv.policies.base import Policy
from infinigen_kv.pool.pool import Pool
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.select import Candidates, Selection, choose, group_margin
from infinigen_kv.rehearsal.statistics import Magnitudes, Moments, PromptStatistics
from infinigen_kv.rehearsal.tail import Tail, ValueMap
from infinigen_kv.step import Step

LAST_QUERIES = 16  # of a prompt; they tell best what the first steps will want

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
    alpha: float
    """The layer's own, see `InfiniGenConfig`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RehearsalLayer:
        """The same one: copies of a cache share the model's weights."""
        return self


class InfiniGenPolicy(Policy):
    """Speculative selection with partial keys kept on the device.

    Prompt statistics grow while the layer attends in full. Where a prompt ends they become a
    `Projection`, and all keys, which pass through the device just then, partial keys. Where nobody
    said how long the prompt is and it came in pieces, and where tokens have lost their places, the
    first step that selects does that, with the keys that the pool returns.
    """

    def __init__(self, layer: RehearsalLayer, config: InfiniGenConfig, kernels: Kernels) -> None:
        self._layer = layer
        self._config = config
        self._kernels = kernels
        self._forget()

    def _forget(self) -> None:
        self._statistics: PromptStatistics | None = None
        self._partial_keys: PartialKeys | None = None
        self._value_map: ValueMap | None = None
        self._allowed: Tensor | None = None
        self._fitted: tuple[bool, ...] = ()
        self._pending_query: Tensor | None = None

    @property
    def nbytes(self) -> int:
        parts = (self._partial_keys, self._value_map)
        return sum(part.nbytes for part in parts if part is not None)

    def predict(self, hidden: Tensor, step: Step) -> Tensor | None:
        return self._layer.predict_query(hidden, step)

    def rehearse(self, query: Tensor, step: Step, pool: Pool) -> Selection | None:
        if step.queries > 1:
            self._pending_query = query
            return None
        self._fit(step, pool)
        assert self._partial_keys is not None
        candidates = _candidates(step, pool)
        self._allowed = candidates.allowed
        return self._kernels.choose(
            query,
            self._partial_keys,
            candidates,
            scaling=self._layer.scaling,
            alpha=self._layer.alpha,
            softcap=self._layer.softcap,
        )

    def observe(
        self, query: Tensor, keys: Tensor, step: Step, pool: Pool, slots: Tensor | None
    ) -> None:
        if not step.selecting:
            self._accumulate(query, keys, step, step.new_weight)
            self._fitted = ()  # the partial keys are behind: fit again when selection resumes
            return
        if step.some_query_is_exact:
            self._accumulate(query, keys, step, step.exact_weight)
        # among several queries those that select learn from the exact ones before them
        if step.queries > 1 and self._fit(step, pool):
            return
        assert self._partial_keys is not None
        if slots is not None:
            self._partial_keys.write(slots, keys)
        elif keys.shape[2] == 1:
            self._kernels.append(self._partial_keys, keys)
        else:
            self._partial_keys.append(keys)

    def finish_prompt(self, keys: Tensor, values: Tensor, step: Step, slots: Tensor | None) -> None:
        """Fit while the prompt's keys pass through the device; tokens that follow undo that."""
        if step.start > 0 and (step.prompt_ends is None or slots is not None):
            return  # more may come, or the order of the keys is not that of the slots
        long = step.length_after >= self._config.min_context
        if not bool(long.any()):
            return
        assert self._statistics is not None
        projection = self._statistics.projection(self._config.partial_dim(keys.shape[3]))
        self._partial_keys = PartialKeys(keys, projection, empty=slots is not None)
        if slots is not None:  # the pool has dropped some of these tokens
            self._partial_keys.write(slots, keys)
        if self._config.tail:
            real = None if step.visible is None else step.visible.to(keys.device).float()
            self._value_map = ValueMap.fit(projection, keys, values, real)
        self._fitted = tuple(long.expand(step.rows).tolist())

    def select(self, step: Step, pool: Pool) -> Selection | None:
        query, self._pending_query = self._pending_query, None
        assert query is not None and self._partial_keys is not None
        scores = self._partial_keys.scores(query, self._layer.scaling, self._layer.softcap)
        return choose(scores, step.candidates, self._layer.alpha)

    def tail(self, selection: Selection) -> Tail | None:
        if self._value_map is None:
            return None
        assert self._partial_keys is not None
        allowed = None if self._allowed is None else self._allowed.flatten(1)
        return Tail(
            self._partial_keys,
            self._value_map,
            selection.index.squeeze(2),
            selection.counts,
            allowed,
        )

    def tails(self) -> tuple[PartialKeys, ValueMap] | None:
        if self._value_map is None or self._partial_keys is None:
            return None
        return self._partial_keys, self._value_map

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
        if self._partial_keys is not None:
            self._partial_keys.take_rows(index)
        if self._value_map is not None:
            self._value_map = self._value_map.rows(index.to(self._value_map.base.device))
        self._fitted = tuple(self._fitted[row] for row in index.tolist()) if self._fitted else ()

    def _accumulate(self, query: Tensor, keys: Tensor, step: Step, weight: Tensor | None) -> None:
        if weight is not None:
            weight = weight.to(keys.device)
        if self._statistics is None:
            skew = self._layer.skew
            self._statistics = Moments.start(keys) if skew is None else Magnitudes.start(keys, skew)
        self._statistics.observe(query, keys, step.before.to(keys.device), weight)

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
        keys, values = pool.all()
        new = self._statistics.projection(self._config.partial_dim(keys.shape[3]))
        old = self._partial_keys
        keep = torch.tensor([not each for each in missing], device=keys.device)
        if old is not None:
            new = new.with_rows(keep, old.projection)
        self._partial_keys = PartialKeys(keys, new)
        if self._config.tail:
            self._value_map = self._fit_values(keys, values, keep, step, pool)
        self._fitted = tuple(a or b for a, b in zip(fitted, missing, strict=True))
        return True

    def _fit_values(
        self, keys: Tensor, values: Tensor, keep: Tensor, step: Step, pool: Pool
    ) -> ValueMap:
        """Of all that is in the pool, but for the rows in ``keep`` as it was."""
        assert self._partial_keys is not None
        real = _known(step, pool, keys)
        new = ValueMap.fit(self._partial_keys.projection, keys, values, real)
        return new if self._value_map is None else new.with_rows(keep, self._value_map)


def _candidates(step: Step, pool: Pool) -> Candidates:
    positions = pool.positions
    return step.candidates if positions is None else HeldCandidates(step, positions)


def _known(step: Step, pool: Pool, keys: Tensor) -> Tensor | None:
    """``(B, T)`` float, 0 for padding and for what comes after the first query that selects, among
    the tokens of the pool; None where all count.
    """
    visible, positions = step.visible, pool.positions
    if positions is not None:
        held = None if visible is None else visible.to(positions.device).gather(1, positions)
        return None if held is None else held.to(keys.device).float()
    past = keys.new_ones(step.rows, step.start, dtype=torch.float32)
    if visible is not None:
        past = visible[:, : step.start].to(past)
    if keys.shape[2] == step.start:
        return None if visible is None else past
    return torch.cat([past, step.exact_weight.to(past)], dim=1)
