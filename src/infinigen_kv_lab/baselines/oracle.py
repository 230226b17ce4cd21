"""The tokens that the true scores would choose: an upper bound, not a system."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from infinigen_kv.attention.dense import grouped_scores
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.policies.base import Policy
from infinigen_kv.policies.candidates import HeldCandidates
from infinigen_kv.policies.entry import (
    CachePlan,
    PolicyBytes,
    PolicyEntry,
    PolicyParts,
    PolicyShape,
    Scoring,
    Selecting,
)
from infinigen_kv.policies.infinigen import InfiniGenPolicy
from infinigen_kv.policies.infinigen_plan import infinigen_bytes
from infinigen_kv.policies.registry import rehearsing_policy
from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.select import Candidates, Selection, group_margin, top_entries
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv.storage.homes.buffer import GROWTH, TokenBuffer
from infinigen_kv.storage.pools.pool import Pool


class OraclePolicy(Policy):
    """As many tokens as InfiniGen chose, but those with the highest true scores.

    It runs InfiniGen's rehearsal for the count, and then ranks by the layer's own query and all
    keys, which it keeps on the device: no system that has to move them could. It has no sinks and
    no window of its own.

    Of all sets of so many tokens it finds the one of the highest scores in the sense of
    `group_margin`, which is not always the one with the least error of the output.
    """

    selects_at_layer = True

    def __init__(self, rehearsing: InfiniGenPolicy, scoring: Scoring) -> None:
        self._rehearsing = rehearsing
        self._scoring = scoring
        self._keys: TokenBuffer | None = None
        self._counts: Tensor | None = None
        self._query: Tensor | None = None

    def __copy__(self) -> OraclePolicy:
        other = OraclePolicy(copy(self._rehearsing), self._scoring)
        other._keys, other._counts, other._query = self._keys, self._counts, self._query
        return other

    @property
    def nbytes(self) -> int:
        kept = 0 if self._keys is None else self._keys.nbytes
        return kept + self._rehearsing.nbytes

    def predict(self, hidden: Tensor, step: Step) -> Tensor | None:
        return self._rehearsing.predict(hidden, step)

    def rehearse(self, query: Tensor, step: Step, pool: Pool) -> Selection | None:
        """Only takes note of the count."""
        chosen = self._rehearsing.rehearse(query, step, pool)
        self._counts = None if chosen is None else _counts(chosen)
        return None

    def select_at_layer(self, query: Tensor, step: Step, pool: Pool) -> Selection | None:
        """The best tokens for the true query ``(B, H, 1, D)``."""
        counts, self._counts = self._counts, None
        assert counts is not None
        positions = pool.positions
        candidates = step.candidates if positions is None else HeldCandidates(step, positions)
        return self._best(query, counts, candidates)

    def observe(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        step: Step,
        pool: Pool,
        slots: Tensor | None,
    ) -> None:
        self._rehearsing.observe(query, keys, values, step, pool, slots)
        if self._keys is None:
            rows, heads, _, dim = keys.shape
            self._keys = TokenBuffer(rows, heads, dim, dtype=keys.dtype, device=keys.device)
        if slots is None:
            self._keys.extend(keys.shape[2]).copy_(keys)
        else:
            self._keys.write(slots, keys)
        self._query = query if step.selecting and step.queries > 1 else None

    def finish_prompt(self, keys: Tensor, values: Tensor, step: Step, slots: Tensor | None) -> None:
        self._rehearsing.finish_prompt(keys, values, step, slots)

    def select(self, step: Step, pool: Pool) -> Selection | None:
        query, self._query = self._query, None
        chosen = self._rehearsing.select(step, pool)
        assert query is not None and chosen is not None
        return self._best(query, _counts(chosen), step.candidates)

    def until_refit(self, length: int) -> int | None:
        return self._rehearsing.until_refit(length)

    def resident_candidates(
        self, count: int, query: Tensor, keys: Tensor, step: Step
    ) -> Tensor | None:
        return self._rehearsing.resident_candidates(count, query, keys, step)

    def truncate(self, length: int) -> None:
        self._rehearsing.truncate(length)
        if length == 0:
            self._keys = None
        elif self._keys is not None:
            self._keys.truncate(length)

    def take_rows(self, index: Tensor) -> None:
        self._rehearsing.take_rows(index)
        if self._keys is not None:
            self._keys.take_rows(index)

    def _best(self, query: Tensor, counts: Tensor, candidates: Candidates) -> Selection:
        assert self._keys is not None
        keys = self._keys.view()
        scores = grouped_scores(query, keys, self._scoring.scaling, self._scoring.softcap)
        if candidates.allowed is not None:
            allowed = candidates.allowed.to(scores.device).unsqueeze(2)
            scores = scores.masked_fill_(~allowed, float("-inf"))
        return top_entries(group_margin(scores), counts)


def _counts(chosen: Selection) -> Tensor:
    """``(B, Q)`` tokens chosen."""
    if chosen.counts is not None:
        return chosen.counts
    rows, _, queries, tokens = chosen.index.shape
    return torch.full((rows, queries), tokens, device=chosen.index.device)


def _policy(parts: PolicyParts) -> OraclePolicy:
    return OraclePolicy(rehearsing_policy(parts), parts.scoring)


def _planned(shape: PolicyShape) -> PolicyBytes:
    """What InfiniGen's holds, and all keys."""
    keys = int(GROWTH * shape.key_bytes * shape.entries)
    return replace(infinigen_bytes(shape), state=keys)


def _plan(config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
    return CachePlan(config, storage, Selecting(_policy, _planned, rehearses=True))


ORACLE = PolicyEntry(
    "oracle", "as many tokens as infinigen, chosen by the true scores: a bound, not a system", _plan
)
