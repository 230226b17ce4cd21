"""Quest: pages of tokens, ranked by what their keys could score at most."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor

from infinigen_kv.policies.base import Policy
from infinigen_kv.policies.entry import PolicyBytes, PolicyParts, PolicyShape, Scoring
from infinigen_kv.policies.settings import PolicySettings
from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.select import Selection
from infinigen_kv.storage.homes.buffer import GROWTH, TokenBuffer
from infinigen_kv.storage.pools.pool import Pool
from infinigen_kv_lab.baselines.entries import budgeted
from infinigen_kv_lab.baselines.scoring import (
    budgets,
    cached_tokens,
    counted,
    side_by_side,
    token_positions,
)

INF = float("inf")
TOKEN_BLOCK = 1024  # keys whose page numbers are written out at once


class QuestPolicy(Policy):
    """The pages whose largest and least key numbers allow the highest score for the true query.

    Source: Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
    ICML 2024 (arXiv 2406.10774), section 3: per page and channel the least and the largest key
    number are kept; a page's bound is the sum over channels of the larger product with the query,
    and the pages with the highest bounds are attended to.

    Departures:

    - Pages are fetched from the home. Since the ranking needs the layer's own query, the fetch
      begins in the layer itself and is waited for.
    - A KV head ranks pages by the query head of its group that likes them best.
    - The page that is being filled is always taken, and the last one taken may be cut, so that the
      budget, a share of the tokens so far, is met to the token in every head.
    - Every layer selects; the authors leave the first two in full.
    """

    selects_at_layer = True

    def __init__(self, scoring: Scoring, settings: PolicySettings) -> None:
        self._scoring = scoring
        self._settings = settings
        self._heads = 0
        self._bounds: TokenBuffer | None = None  # per page: least numbers, then largest ones
        self._length = 0
        self._cut: int | None = None  # bounds of the pages from this token on are stale
        self._query: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._bounds is None else self._bounds.nbytes

    def __copy__(self) -> QuestPolicy:
        """One whose bounds, which are written in place, go their own way."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._bounds = deepcopy(self._bounds)
        return other

    def select_at_layer(self, query: Tensor, step: Step, pool: Pool) -> Selection:
        """Pages for the true query ``(B, H, 1, D)``."""
        self._catch_up(pool, step)
        return self._chosen(query, step, 0)

    def observe(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        step: Step,
        pool: Pool,
        slots: Tensor | None,
    ) -> None:
        if self._bounds is None:
            rows, heads, _, dim = keys.shape
            self._heads = heads
            self._bounds = TokenBuffer(rows, heads, 2 * dim, dtype=keys.dtype, device=keys.device)
        self._catch_up(pool, step)
        for begin in range(0, step.queries, TOKEN_BLOCK):
            block = keys[:, :, begin : begin + TOKEN_BLOCK]
            self._add(block, step, step.start + begin)
        self._length = step.start + step.queries
        if step.queries > 1 and step.selecting:
            self._query = query

    def select(self, step: Step, pool: Pool) -> Selection | None:
        query, self._query = self._query, None
        assert query is not None
        return side_by_side(
            [
                self._chosen(query[:, :, place : place + 1], step, place)
                for place in range(step.queries)
            ],
            step.start,
        )

    def truncate(self, length: int) -> None:
        if length == 0:
            self._bounds, self._cut, self._length = None, None, 0
        elif length < self._length:
            self._length = self._cut = length

    def take_rows(self, index: Tensor) -> None:
        if self._bounds is not None:
            self._bounds.take_rows(index)

    # Parts of the above. Pages are numbered from each row's first real token on.

    def _add(self, keys: Tensor, step: Step, first: int, oldest: Tensor | None = None) -> None:
        """Let the bounds hold keys ``(B, H_kv, m, D)`` of the tokens from ``first`` on, where they
        are real and in the pages from ``oldest`` ``(B or 1, 1)`` on.
        """
        bounds, dim = self._bounds, keys.shape[3]
        assert bounds is not None
        span = slice(first, first + keys.shape[2])
        page = (step.logical[:, span] // self._settings.page_tokens).to(keys.device)
        missing = int(page.max()) + 1 - bounds.length
        if missing > 0:
            _clear(bounds.extend(missing), dim)
        valid = None if step.visible is None else step.visible[:, span].to(keys.device)
        if oldest is not None:
            recent = page >= oldest
            valid = recent if valid is None else valid & recent
        where = page[:, None, :, None].expand_as(keys)
        held = bounds.view()
        for part, name, nothing in ((slice(dim), "amin", INF), (slice(dim, None), "amax", -INF)):
            source = keys if valid is None else keys.where(valid[:, None, :, None], nothing)
            held[..., part].scatter_reduce_(2, where, source, name)

    def _catch_up(self, pool: Pool, step: Step) -> None:
        """Make the bounds again that were too wide after tokens had been taken back."""
        cut, self._cut, bounds = self._cut, None, self._bounds
        if cut is None or bounds is None:
            return
        keys, _ = pool.all()
        oldest = _row_lengths(step, cut).to(keys.device) // self._settings.page_tokens
        bounds.truncate(int(oldest.max()) + 1)
        stale = torch.arange(bounds.length, device=keys.device) >= oldest  # (B or 1, pages)
        dim = keys.shape[3]
        held = bounds.view()
        stale = stale[:, None, :, None]
        held[..., :dim].masked_fill_(stale, INF)
        held[..., dim:].masked_fill_(stale, -INF)
        for begin in range(0, cut, TOKEN_BLOCK):
            end = min(begin + TOKEN_BLOCK, cut)
            self._add(keys[:, :, begin:end], step, begin, oldest)

    def _chosen(self, query: Tensor, step: Step, place: int) -> Selection:
        """What the query number ``place`` ``(B, H, 1, D)`` of a forward attends to."""
        size, device = self._settings.page_tokens, query.device
        counts, cached = budgets(step, self._settings, place), cached_tokens(step, place)
        full = [max(0, tokens - 1) // size for tokens in cached]  # pages before the newest
        newest = [
            min(count, tokens - size * pages)
            for count, tokens, pages in zip(counts, cached, full, strict=True)
        ]
        column = torch.arange(max(counts), device=device)
        own, total, valid = (
            torch.tensor(each, device=device).view(-1, 1, 1) for each in (newest, cached, counts)
        )
        tokens = total - own + column  # (B or 1, 1, n)
        pages = max(-(-(a - b) // size) for a, b in zip(counts, newest, strict=True))
        if pages:
            ranked = self._ranked(query, torch.tensor(full, device=device), pages)
            rest = (column - own).clamp(min=0).expand(len(ranked), ranked.shape[1], -1)
            page = ranked.gather(2, (rest // size).clamp(max=pages - 1))
            tokens = tokens.where(column < own, page * size + rest % size)
        tokens = tokens.where(column < valid, total - own)
        tokens = tokens.expand(query.shape[0], self._heads, -1)
        index = token_positions(tokens, step)
        return Selection(index.unsqueeze(2), counted(counts, device))

    def _ranked(self, query: Tensor, full: Tensor, pages: int) -> Tensor:
        """The best ``pages`` of the first ``full`` ``(B or 1,)`` pages: ``(B, H_kv, pages)``."""
        assert self._bounds is not None
        held = self._bounds.view().float()
        rows, heads, count, width = held.shape
        grouped = query.reshape(rows, heads, -1, width // 2).float() * self._scoring.scaling
        least, largest = held.split(width // 2, dim=3)
        scores = grouped.clamp(min=0) @ largest.mT + grouped.clamp(max=0) @ least.mT
        if self._scoring.softcap is not None:
            scores = torch.tanh(scores / self._scoring.softcap) * self._scoring.softcap
        there = torch.arange(count, device=scores.device) < full.view(-1, 1, 1, 1)
        scores = scores.masked_fill(~there, -INF)
        margin = (scores - scores.amax(dim=-1, keepdim=True)).amax(dim=2)
        # the best page of each query head has a margin of 0: of these the first one comes first
        return margin.argsort(dim=2, descending=True, stable=True)[..., :pages]


def _clear(bounds: Tensor, dim: int) -> None:
    bounds[..., :dim] = INF
    bounds[..., dim:] = -INF


def _row_lengths(step: Step, length: int) -> Tensor:
    """Real tokens of each row among the first ``length``: ``(B or 1, 1)``."""
    if step.visible is None:
        return torch.tensor([[length]])
    return step.visible[:, :length].sum(dim=1, keepdim=True)


def _policy(parts: PolicyParts) -> QuestPolicy:
    return QuestPolicy(parts.scoring, parts.settings)


def _planned(shape: PolicyShape) -> PolicyBytes:
    """The least and the largest numbers of every page."""
    per_token = GROWTH * 2 * shape.key_bytes / shape.settings.page_tokens
    return PolicyBytes(state=int(per_token * shape.entries))


QUEST = budgeted(
    "quest",
    "a fixed budget: pages of tokens, ranked by bounds of their keys; no prefetch",
    _policy,
    _planned,
)
