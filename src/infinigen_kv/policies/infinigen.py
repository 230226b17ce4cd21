"""InfiniGen: rehearse the layer's scores from the previous layer's input, move what matters."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.kernels.base import Kernels
from infinigen_kv.policies.base import Policy
from infinigen_kv.policies.candidates import HeldCandidates
from infinigen_kv.policies.rehearsal_layer import RehearsalLayer
from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.coded_partial_keys import make_partial_keys
from infinigen_kv.rehearsal.partial_keys import NEVER, PartialKeys
from infinigen_kv.rehearsal.projection import Projection
from infinigen_kv.rehearsal.recent import MAX_WAITING, SeenTokens
from infinigen_kv.rehearsal.running import RunningStatistics
from infinigen_kv.rehearsal.select import Candidates, Selection, likely_tokens, select_tokens
from infinigen_kv.rehearsal.statistics import Moments, PromptStatistics
from infinigen_kv.rehearsal.tail import Tail, ValueMap
from infinigen_kv.storage.pools.pool import Pool


class _Fit(NamedTuple):
    """What a refit replaces."""

    partial_keys: PartialKeys
    value_map: ValueMap | None
    next_fit: tuple[int, ...]
    known: int


class InfiniGenPolicy(Policy):
    """Speculative selection with partial keys kept on the device.

    Prompt statistics grow while the layer attends in full. Where a prompt ends they become a
    `Projection`, and all keys, which pass through the device just then, partial keys. Where nobody
    said how long the prompt is and it came in pieces, and where tokens have lost their places, the
    first step that selects does that, with the keys that the pool returns. So does the first one
    after tokens were taken back that the last fit knew.
    """

    def __init__(self, layer: RehearsalLayer, config: InfiniGenConfig, kernels: Kernels) -> None:
        self._layer = layer
        self._config = config
        self._kernels = kernels
        self._forget()

    def _forget(self) -> None:
        # no method of this object: a dropped cache must go at once, not with the garbage
        self._running = RunningStatistics(partial(self._layer.sums, tail=self._config.tail))
        self._forget_fit()

    def _forget_fit(self) -> None:
        self._partial_keys: PartialKeys | None = None
        self._value_map: ValueMap | None = None
        self._allowed: Tensor | None = None
        self._pending_query: Tensor | None = None
        self._earlier: list[_Fit] = []  # while drafts that made refits may be taken back
        self._known = 0  # tokens until the last of those that the fit was made from
        self._covered = 0  # tokens that the partial keys have followed
        self._outdate()

    def _outdate(self) -> None:
        """The partial keys are behind: fit again when selection resumes."""
        self._fitted: tuple[bool, ...] = ()
        self._next_fit: tuple[int, ...] = ()  # tokens held, padding included, that call for another

    def __copy__(self) -> InfiniGenPolicy:
        """One that goes its own way: what this one learns later, it does not."""
        other = InfiniGenPolicy(self._layer, self._config, self._kernels)
        other.__dict__.update(self.__dict__)
        other._running, other._partial_keys = copy(self._running), copy(self._partial_keys)
        other._earlier = []
        return other

    @property
    def nbytes(self) -> int:
        parts = [self._partial_keys, self._value_map]
        parts += [part for fit in self._earlier for part in (fit.partial_keys, fit.value_map)]
        return sum(part.nbytes for part in parts if part is not None)

    def predict(self, hidden: Tensor, step: Step) -> Tensor | None:
        return self._layer.predict_query(hidden, step)

    def rehearse(self, query: Tensor, step: Step, pool: Pool) -> Selection | None:
        if self._covered != step.start:
            self._outdate()
        if self._next_fit and step.start >= min(self._next_fit):
            self._refit(step, pool)
        if self._partial_keys is not None:
            self._partial_keys.settle(step.start)
        if step.queries > 1:
            self._pending_query = query
            return None
        self._fit(step, pool)
        assert self._partial_keys is not None
        candidates = _candidates(step, pool)
        self._allowed = candidates.allowed
        return self._kernels.select(
            query,
            self._partial_keys,
            candidates,
            scaling=self._layer.scaling,
            alpha=self._layer.alpha,
            softcap=self._layer.softcap,
        )

    def observe(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        step: Step,
        pool: Pool,
        slots: Tensor | None,
    ) -> None:
        seen = SeenTokens.of(query, keys, values, step, step.new_weight)
        if not step.selecting:
            self._running.add(seen)
            return
        exact = seen.weighing(step.exact_weight) if step.some_query_is_exact else None
        # among several queries those that select learn from the exact ones before them
        fitted = step.queries > 1 and self._fit(step, pool, exact)
        learned = seen if self._next_fit else exact
        if learned is None:
            self._running.pause()
        else:
            self._running.add(learned)
        if not fitted:
            self._append(keys, slots)
        self._covered = step.start + step.queries
        if self._covered >= self._known + MAX_WAITING:
            self._earlier = []  # a refit is not taken back any more

    def _append(self, keys: Tensor, slots: Tensor | None) -> None:
        assert self._partial_keys is not None
        if slots is not None:
            self._partial_keys.write(slots, keys)
        elif keys.shape[2] == 1:
            self._kernels.append(self._partial_keys, keys)
        else:
            self._partial_keys.append(keys)

    @torch.inference_mode(False)  # what is fitted may be used outside of it later
    @torch.no_grad()
    def finish_prompt(self, keys: Tensor, values: Tensor, step: Step, slots: Tensor | None) -> None:
        """Fit while the prompt's keys pass through the device; tokens that follow undo that."""
        held = step.start + step.queries
        if keys.shape[2] == held:
            self._running.complete(keys, values, step.visible)
        if step.start > 0 and (step.prompt_ends is None or slots is not None):
            return  # more may come, or the order of the keys is not that of the slots
        long = step.length_after >= self._config.min_context
        if not bool(long.any()):
            return
        statistics = self._running.total()
        projection = statistics.projection(self._config.partial_dim(keys.shape[3]))
        config = self._config
        self._partial_keys = make_partial_keys(config, keys, projection, step.visible, held, slots)
        self._value_map = self._fit_values(projection, statistics)
        self._fitted = tuple(long.expand(step.rows).tolist())
        self._known = self._covered = held
        self._next_fit = ()
        self._plan_fits(self._fitted, [held] * step.rows, statistics)

    def select(self, step: Step, pool: Pool) -> Selection | None:
        query, self._pending_query = self._pending_query, None
        assert query is not None and self._partial_keys is not None
        scores = self._partial_keys.scores(query, self._layer.scaling, self._layer.softcap)
        return select_tokens(scores, step.candidates, self._layer.alpha)

    def tail(self, selection: Selection) -> Tail | None:
        if self._value_map is None:
            return None
        assert self._partial_keys is not None
        allowed = None if self._allowed is None else self._allowed.flatten(1)
        index = selection.index.squeeze(2)
        return Tail(self._partial_keys, self._value_map, index, selection.counts, allowed)

    def tails(self) -> tuple[PartialKeys, ValueMap] | None:
        if self._value_map is None or self._partial_keys is None:
            return None
        return self._partial_keys, self._value_map

    def resident_candidates(
        self, count: int, query: Tensor, keys: Tensor, step: Step
    ) -> Tensor | None:
        """What the prompt's last queries would like best, by their true scores."""
        scaling, softcap = self._layer.scaling, self._layer.softcap
        return likely_tokens(count, query, keys, step.visible, scaling=scaling, softcap=softcap)

    def truncate(self, length: int) -> None:
        if length == 0:
            self._forget()
            return
        self._running.truncate(length)
        if length < self._known and not self._restore_fit(length):
            self._forget_fit()
        elif self._partial_keys is not None:
            self._partial_keys.truncate(length)
            self._covered = min(self._covered, length)

    def _restore_fit(self, length: int) -> bool:
        """Take refits back that would not have been made yet without the drafts taken back."""
        while self._earlier and length < self._known:
            (self._partial_keys, self._value_map, self._next_fit, self._known) = self._earlier.pop()
        return length >= self._known

    def take_rows(self, index: Tensor) -> None:
        self._earlier = []
        self._running.take_rows(index)
        if self._partial_keys is not None:
            self._partial_keys.take_rows(index)
        if self._value_map is not None:
            self._value_map = self._value_map.rows(index.to(self._value_map.base.device))
        rows = index.tolist()
        self._fitted = tuple(self._fitted[row] for row in rows) if self._fitted else ()
        self._next_fit = tuple(self._next_fit[row] for row in rows) if self._next_fit else ()

    def until_refit(self, length: int) -> int | None:
        current = self._partial_keys if self._covered == length else None
        steady = NEVER if current is None else current.steady_for(length)
        if self._config.refit_every == 0 and (current or self._config.index_bits is None):
            return None if steady == NEVER else steady
        # without a fit, the first step that selects makes one
        planned = self._next_fit if current else ()
        return max(1, min(steady, min(planned, default=self._config.min_context) - length))

    def _plan_fits(
        self, rows: tuple[bool, ...], lengths: list[int], statistics: PromptStatistics
    ) -> None:
        """These rows were fitted when they held so many tokens, padding included."""
        every = self._config.refit_every
        if not isinstance(statistics, Moments) or every == 0:
            return
        known = statistics.count.flatten().tolist()
        before = self._next_fit or (NEVER,) * len(rows)
        self._next_fit = tuple(
            length + min(every, max(1, int(count))) if fitted else old
            for fitted, length, count, old in zip(rows, lengths, known, before, strict=True)
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def _refit(self, step: Step, pool: Pool) -> None:
        """Choose the partial dimensions anew of the rows that have grown enough since.

        Those of the prompt fit less and less what comes later. The partial keys are turned into the
        new ones, see `PartialKeys.refitted`, so that no key has to be moved.
        """
        if self._running.missing:
            self._running.complete(*pool.all(), step.visible, pool.positions)
        moments, partial_keys = self._running.total(), self._partial_keys
        assert partial_keys is not None and isinstance(moments, Moments)
        if step.drafts:
            earlier = _Fit(partial_keys, self._value_map, self._next_fit, self._known)
            self._earlier = [*self._earlier, earlier]
        due = tuple(step.start >= each for each in self._next_fit)
        keep = torch.tensor([not each for each in due], device=moments.device)
        self._partial_keys = partial_keys.refitted(moments, keep)
        self._value_map = self._fit_values(self._partial_keys.projection, moments, keep)
        self._known = step.start
        self._plan_fits(due, [step.start] * len(due), moments)

    def _fit(self, step: Step, pool: Pool, exact: SeenTokens | None = None) -> bool:
        """Choose the partial dimensions of the rows that newly select, and write partial keys of
        all that is in the pool. Returns False if no row does.

        ``exact`` are those tokens of the forward under way that may be learned from.
        """
        if self._fitted == step.selecting_rows:
            return False
        fitted = self._fitted or (False,) * step.rows
        missing = tuple(
            wants and not done for wants, done in zip(step.selecting_rows, fitted, strict=True)
        )
        if not any(missing):
            return False
        statistics = self._fit_rows(missing, step, pool, exact)
        counts = step.exact_queries.sum(1).expand(step.rows).tolist()
        self._known = step.start + (0 if exact is None else max(counts))
        self._covered = pool.length
        self._plan_fits(missing, [step.start + each for each in counts], statistics)
        self._fitted = tuple(a or b for a, b in zip(fitted, missing, strict=True))
        return True

    @torch.inference_mode(False)
    @torch.no_grad()
    def _fit_rows(
        self, rows: tuple[bool, ...], step: Step, pool: Pool, exact: SeenTokens | None
    ) -> PromptStatistics:
        """Returns the sums that tell."""
        keys, values = pool.all()
        self._running.complete(keys, values, step.visible, pool.positions)
        statistics = self._running.total(exact)
        new = statistics.projection(self._config.partial_dim(keys.shape[3]))
        old = self._partial_keys
        keep = torch.tensor([not each for each in rows], device=keys.device)
        if old is not None:
            new = new.with_rows(keep, old.projection)
        self._partial_keys = make_partial_keys(self._config, keys, new, step.visible, step.start)
        if old is not None:
            self._partial_keys.keep_rows(keep, old)
        self._value_map = self._fit_values(new, statistics, keep)
        return statistics

    def _fit_values(
        self, projection: Projection, statistics: PromptStatistics, keep: Tensor | None = None
    ) -> ValueMap | None:
        """From these sums, but for the rows in ``keep`` as it was."""
        if not self._config.tail:
            return None
        assert isinstance(statistics, Moments)
        new = ValueMap.fit(projection, statistics)
        if keep is None or self._value_map is None:
            return new
        return new.with_rows(keep, self._value_map)


def _candidates(step: Step, pool: Pool) -> Candidates:
    positions = pool.positions
    return step.candidates if positions is None else HeldCandidates(step, positions)
