"""The sums of a text that grows and is cut back: afterwards they are as if what was taken back had
never been read.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from infinigen_kv.rehearsal.checkpoints import PART, Checkpoints
from infinigen_kv.rehearsal.projection import TOKEN_BLOCK
from infinigen_kv.rehearsal.recent import MAX_WAITING, MIN_WAITING, RecentTokens, SeenTokens
from infinigen_kv.rehearsal.statistics import PromptStatistics


class QuerySums(NamedTuple):
    """What the queries of a text's first tokens have added to the sums."""

    sums: Tensor  # (B, H_kv, n), see `PromptStatistics.query_sums`
    real: Tensor  # (B,) real tokens among them

    def rows(self, index: Tensor) -> QuerySums:
        """Those of the batch rows ``index``."""
        sums, real = self
        return QuerySums(sums[index.to(sums.device)], real[index.to(real.device)])


class RunningStatistics:
    """Sums over a layer's tokens that can be taken back to any length.

    Nothing is subtracted: a difference of large sums has little precision.

    - The newest tokens wait to be summed. Those that are taken back while they wait leave no trace.
    - Of earlier lengths the queries' sums are kept at a few `Checkpoints`: queries are stored
      nowhere. Between two of these they are taken for alike, up to their weights.
    - Sums over keys and values are made anew, from the home that holds them (`complete`).

    Parameters
    ----------
    start
        Makes empty sums for keys and values like these.
    """

    def __init__(self, start: Callable[[Tensor, Tensor], PromptStatistics]) -> None:
        self._start = start
        self._sums: PromptStatistics | None = None
        self._summed = 0  # tokens until the last of those in the sums
        self._real = torch.zeros(0)  # of these in each row
        self._recent = RecentTokens()
        self._checkpoints: Checkpoints[QuerySums] = Checkpoints()
        self._missing = 0

    @property
    def missing(self) -> int:
        """How many of the first tokens are to be given to `complete` before sums are asked for."""
        return self._missing

    @property
    def waiting(self) -> int:
        """Tokens that are not summed yet."""
        return self._recent.tokens

    def add(self, tokens: SeenTokens) -> None:
        """Add the tokens of a forward."""
        rest = tokens.tokens - MAX_WAITING
        if rest > 0:
            self._settle(0)
            self._sum(tokens.first(rest))
            tokens = tokens.last(MAX_WAITING)
        elif self._recent.tokens >= MAX_WAITING:
            self._settle(MIN_WAITING)
        self._recent.add(tokens)

    def pause(self) -> None:
        """No tokens come for a while: let no more of them wait than need to."""
        if self._recent.tokens > MIN_WAITING:
            self._settle(MIN_WAITING)

    def complete(
        self,
        keys: Tensor,
        values: Tensor,
        visible: Tensor | None,
        positions: Tensor | None = None,
    ) -> None:
        """Sum up again the first `missing` tokens. Those evicted meanwhile stay unknown.

        Parameters
        ----------
        keys, values
            ``(B, H_kv, T, D)`` and ``(B, H_kv, T, D_v)`` of all that is held.
        visible
            ``(B, *)`` False for padding, by position; None where there is none.
        positions
            ``(B, T)`` of the tokens held; None for all in order.
        """
        first, self._missing = self._missing, 0
        if first == 0:
            return
        assert self._sums is not None
        if positions is None:
            part = slice(0, first)
            keys, values = keys[:, :, part], values[:, :, part]
            weight = None if visible is None else visible[:, part]
        else:
            weight = positions < first
            if visible is not None:
                weight = weight & visible.to(positions.device).gather(1, positions)
        self._sums.observe_keys(keys, None if weight is None else weight.to(keys.device), values)

    def total(self, more: SeenTokens | None = None) -> PromptStatistics:
        """The sums of all tokens, those that wait included, and of some ``more``."""
        assert self._missing == 0
        waiting = self._recent.runs() if more is None else [*self._recent.runs(), more]
        sums = self._sums
        if sums is None:
            sums = self._start(waiting[0].key, waiting[0].value)
        sums = copy(sums)
        for run in waiting:
            sums.observe(run.query, run.key, run.position, run.weight, run.value)
        return sums

    @torch.inference_mode(False)
    @torch.no_grad()
    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        self._recent.truncate(length)
        if length >= self._summed or self._sums is None:
            return
        left = self._until(length)
        self._sums = self._sums.restarted(left.sums)
        self._summed, self._real, self._missing = length, left.real, length
        self._checkpoints = self._checkpoints.truncated(length)

    def take_rows(self, index: Tensor) -> None:
        """Become the batch rows ``index`` ``(n,)``, repeats allowed."""
        if self._sums is not None:
            self._sums = self._sums.rows(index.to(self._sums.device))
            self._real = self._real[index.to(self._real.device)]
        self._recent = self._recent.rows(index)
        self._checkpoints = self._checkpoints.mapped(lambda state: state.rows(index))

    def __copy__(self) -> RunningStatistics:
        """One that goes its own way."""
        other = RunningStatistics(self._start)
        other.__dict__.update(self.__dict__)
        other._sums, other._recent = copy(self._sums), self._recent.copy()
        return other

    @torch.inference_mode(False)  # sums may go on outside of it
    @torch.no_grad()
    def _settle(self, left: int) -> None:
        """Sum up the tokens that wait, but for the newest ``left``."""
        for run in self._recent.take(self._recent.tokens - left):
            self._sum(run)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _sum(self, tokens: SeenTokens) -> None:
        """Add tokens to the sums, with checkpoints where they are wanted."""
        if self._sums is None:
            self._sums = self._start(tokens.key, tokens.value)
        begins = tokens.begins
        if begins is not None and self._summed and self._checkpoints.at(tokens.start) is None:
            self._note(tokens.start, tokens.real_before, begins)
        for start in range(0, tokens.tokens, TOKEN_BLOCK):
            block = tokens.part(slice(start, start + TOKEN_BLOCK))
            self._sums.observe(block.query, block.key, block.position, block.weight, block.value)
            self._summed, self._real = block.end, block.real_after
            if begins is not None and block.end < tokens.end:
                self._note(block.end, self._real, PART)
        if tokens.ends is not None:
            self._note(tokens.end, self._real, tokens.ends)

    def _note(self, length: int, real: Tensor, rank: int) -> None:
        assert self._sums is not None
        state = QuerySums(self._sums.query_sums, real)
        self._checkpoints = self._checkpoints.noted(length, state, rank)

    def _until(self, length: int) -> QuerySums:
        """Of the queries before ``length``, as far as is known."""
        assert self._sums is not None
        exact = self._checkpoints.at(length)
        if exact is not None:
            return exact
        below = self._checkpoints.last_before(length)
        above, end = self._checkpoints.first_beyond(length), self._summed
        sums, real = QuerySums(self._sums.query_sums, self._real)
        if above is not None:
            (sums, real), end = above.state, above.length
        least = QuerySums(torch.zeros_like(sums), torch.zeros_like(real))
        if below is not None:
            least = below.state
        # padding comes first, so that those that go are real
        left = torch.minimum((real - (end - length)).clamp_min(0).maximum(least.real), real)
        some, all_of_them, known = map(self._sums.query_weight, (left, real, least.real))
        share = (some - known) / (all_of_them - known).clamp_min(1)
        share = share.to(sums).view(-1, *[1] * (sums.dim() - 1))
        return QuerySums(least.sums + (sums - least.sums) * share, left)
