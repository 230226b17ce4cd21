"""Selection against plain loops over rows, heads, queries and tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.select import (
    Selection,
    group_margin,
    select_tokens,
    selection_mask,
    top_entries,
)

INFINITY = float("inf")


@dataclass
class Fixed:
    """Candidates given as tensors: ``allowed``, ``kept`` ``(B, 1, Q, S)``, a cap for all."""

    allowed: Tensor | None
    kept: Tensor
    most: int

    def mark_kept(self, margin: Tensor) -> None:
        margin.masked_fill_(self.kept, INFINITY)

    def bound(self, wanted: Tensor) -> Tensor:
        least = self.kept[:, 0].sum(-1)
        return wanted.clamp(max=self.most).maximum(least)


def fixed(allowed: Tensor | None, kept: Tensor, most: int) -> Any:
    """`Fixed`, of which only the compiled code would ask more."""
    return Fixed(allowed, kept, most)


def naive_margin(scores: Sequence[Sequence[float]]) -> list[float]:
    """Of ``scores`` by query head and token; the best tokens of a head by their sum over a group,
    so little that they stay above the others.
    """
    margins = []
    for token in range(len(scores[0])):
        behind = [head[token] - max(head) for head in scores]
        margins.append(max(behind) or max(-1e-3, sum(behind) / 2**20))
    return margins


def test_group_margin_equals_a_loop() -> None:
    scores = torch.randn(2, 3, 4, 2, 5, generator=torch.Generator().manual_seed(0))
    margin = group_margin(scores)
    for row in range(2):
        for head in range(3):
            for query in range(2):
                expected = naive_margin(scores[row, head, :, query].tolist())
                assert margin[row, head, query].tolist() == pytest.approx(expected, abs=1e-6)


def test_every_query_head_ranks_on_its_own_scale() -> None:
    """A head with large scores must not drown the favourite of one with small scores."""
    scores = torch.tensor([[100.0, 90.0, 80.0], [0.1, 0.0, 0.3]]).view(1, 1, 2, 1, 3)
    assert group_margin(scores).flatten().tolist() == pytest.approx([0.0, -0.3, 0.0], abs=1e-4)


def test_best_tokens_of_a_group_come_in_an_order_that_their_places_do_not_change() -> None:
    """Each query head has its own best token, all of them as good: fewer places than heads."""
    scores = torch.tensor([[5.0, 1.0, 0.0, 2.0], [0.0, 6.0, 4.0, 1.0], [-9.0, 3.0, 4.0, 0.0]])
    order = torch.tensor([2, 3, 0, 1])
    for count, expected in ((1, {1}), (2, {1, 2}), (3, {0, 1, 2})):
        for places in (torch.arange(4), order):
            margin = group_margin(scores[:, places].view(1, 1, 3, 1, 4))
            chosen = top_entries(margin, torch.tensor([[count]])).index.flatten()
            assert set(places[chosen].tolist()) == expected


def test_margin_of_one_query_head_is_the_distance_to_its_best() -> None:
    scores = torch.tensor([3.0, 5.0, -INFINITY, 4.0]).view(1, 1, 1, 1, 4)
    assert group_margin(scores).flatten().tolist() == [-2.0, 0.0, -INFINITY, -1.0]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Any, float]:
    rows, heads, group, queries = (draw(st.integers(1, 3)) for _ in range(4))
    tokens = draw(st.integers(1, 9))
    shape = (rows, heads, group, queries, tokens)
    # few distinct values make many ties; with halves, no rounding
    values = st.integers(-12, 12).map(lambda v: v / 2)
    count = math.prod(shape)
    scores = torch.tensor(draw(st.lists(values, min_size=count, max_size=count))).view(shape)
    marks = st.lists(
        st.booleans(), min_size=rows * queries * tokens, max_size=rows * queries * tokens
    )
    allowed = None
    if draw(st.booleans()):
        allowed = torch.tensor(draw(marks)).view(rows, 1, queries, tokens)
    kept = torch.tensor(draw(marks)).view(rows, 1, queries, tokens)
    kept = kept & (kept if allowed is None else allowed)
    most = draw(st.integers(0, tokens))
    return scores, fixed(allowed, kept, most), draw(st.integers(0, 12)) / 2


@given(problems())
def test_choose_equals_a_loop(problem: tuple[Tensor, Any, float]) -> None:
    scores, candidates, alpha = problem
    rows, heads, _, queries, tokens = scores.shape
    before = scores.clone()
    selection = select_tokens(scores, candidates, alpha)
    mask = selection_mask(selection, tokens)
    for row in range(rows):
        for query in range(queries):
            allowed = [
                token
                for token in range(tokens)
                if candidates.allowed is None or candidates.allowed[row, 0, query, token]
            ]
            kept = {token for token in allowed if candidates.kept[row, 0, query, token]}
            margins = []
            for head in range(heads):
                seen = before[row, head, :, query][:, allowed].tolist()
                found = naive_margin(seen) if allowed else []
                margins.append(dict(zip(allowed, found, strict=True)))
            wanted = [
                sum(token in kept or margin[token] > -alpha for token in allowed)
                for margin in margins
            ]
            count = max(min(round(sum(wanted) / heads), candidates.most), len(kept))
            count = min(count, len(allowed))
            for head, margin in enumerate(margins):
                chosen = mask[row, head, query].nonzero().flatten().tolist()
                assert len(chosen) == count
                assert kept <= set(chosen) <= set(allowed)
                ranked = sorted(margin[token] for token in allowed if token not in kept)[::-1]
                others = sorted(margin[token] for token in chosen if token not in kept)[::-1]
                assert others == ranked[: count - len(kept)]


def test_the_count_is_the_mean_over_the_heads_of_a_row() -> None:
    scores = torch.zeros(2, 2, 1, 1, 6)
    scores[0, 0, 0, 0, 1:] = -10.0  # one token within alpha
    scores[0, 1, 0, 0, 5:] = -10.0  # five
    scores[1, :, 0, 0, 2:] = -10.0  # two in both
    none = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
    selection = select_tokens(scores, fixed(None, none, most=6), alpha=4.0)
    assert selection.counts is not None
    assert selection.counts.tolist() == [[3], [2]]
    assert selection.index.shape == (2, 2, 1, 3)
    assert selection.fetched() == 2.5


def test_a_margin_of_exactly_alpha_is_too_far() -> None:
    scores = torch.tensor([0.0, -4.0, -3.5, -9.0]).view(1, 1, 1, 1, 4)
    none = torch.zeros(1, 1, 1, 4, dtype=torch.bool)
    selection = select_tokens(scores, fixed(None, none, most=4), alpha=4.0)
    assert sorted(selection.index.flatten().tolist()) == [0, 2]


def test_one_row_and_query_need_no_counts() -> None:
    margin = torch.tensor([[[[0.0, -3.0, -1.0, -2.0]], [[-5.0, 0.0, -1.0, -0.5]]]])
    selection = top_entries(margin, torch.tensor([[2]]))
    assert selection.counts is None
    assert selection.fetched() == 2.0
    assert [sorted(each) for each in selection.index[0, :, 0].tolist()] == [[0, 2], [1, 3]]


def test_leading_entries_are_the_meant_ones_where_rows_differ() -> None:
    margin = torch.tensor([[0.0, -3.0, -1.0, -2.0], [-5.0, 0.0, -1.0, -0.5]]).view(2, 1, 1, 4)
    selection = top_entries(margin, torch.tensor([[3], [1]]))
    assert selection.index[0, 0, 0].tolist() == [0, 2, 3]
    assert selection.index[1, 0, 0, 0] == 1
    mask = selection_mask(selection, 4)
    assert mask[:, 0, 0].tolist() == [[True, False, True, True], [False, True, False, False]]


def test_a_query_may_choose_nothing() -> None:
    selection = top_entries(torch.zeros(2, 1, 1, 3), torch.tensor([[0], [2]]))
    assert selection_mask(selection, 3).sum(-1).flatten().tolist() == [0, 2]
    assert top_entries(torch.zeros(1, 1, 1, 3), torch.tensor([[0]])).index.shape[-1] == 0


def test_selection_mask_equals_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    index = torch.rand(2, 3, 4, 7, generator=generator).argsort(-1)[..., :5]
    counts = torch.randint(0, 6, (2, 4), generator=generator)
    for meant in (counts, None):
        mask = selection_mask(Selection(index, meant), 7)
        for row in range(2):
            for head in range(3):
                for query in range(4):
                    n = 5 if meant is None else int(meant[row, query])
                    chosen = set(index[row, head, query, :n].tolist())
                    assert mask[row, head, query].tolist() == [t in chosen for t in range(7)]


@given(
    seed=st.integers(0, 10_000),
    start=st.integers(2, 14),
    queries=st.integers(1, 4),
    padding=st.none() | st.tuples(st.integers(0, 6), st.integers(0, 6)),
    recent=st.integers(0, 5),
    sinks=st.integers(0, 3),
    max_fetch=st.sampled_from([0.05, 0.25, 0.5, 1.0]),
    min_context=st.integers(1, 8),
    alpha=st.sampled_from([0.0, 1.0, 3.0]),
)
def test_choose_from_a_step_equals_a_loop(
    seed: int,
    start: int,
    queries: int,
    padding: tuple[int, int] | None,
    recent: int,
    sinks: int,
    max_fetch: float,
    min_context: int,
    alpha: float,
) -> None:
    """What one step may and must choose: window, sinks, padding, cap and short rows."""
    config = InfiniGenConfig(
        alpha=alpha,
        recent_tokens=recent,
        sink_tokens=sinks,
        max_fetch=max_fetch,
        min_context=min_context,
    )
    rows, total = 2, start + queries
    visible = torch.ones(rows, total, dtype=torch.bool)
    for row, pads in enumerate(padding or ()):
        visible[row, : min(pads, start - 1)] = False
    step = Step(
        start=start,
        queries=queries,
        rows=rows,
        visible=None if visible.all() else visible,
        position_ids=torch.arange(start, total)[None],
        selecting=True,
        config=config,
    )
    if not step.selecting:
        longest = visible.sum(1).max() - 1
        assert longest < min_context
        return
    tokens = step.candidates.tokens
    assert tokens == (start if queries == 1 else total)
    scores = torch.randn(rows, 2, 2, queries, tokens, generator=torch.Generator().manual_seed(seed))
    selection = select_tokens(scores.clone(), step.candidates, alpha)
    mask = selection_mask(selection, tokens)
    for row in range(rows):
        for query in range(queries):
            past = [t for t in range(start + query) if visible[row, t]]
            kept = set(past[:sinks]) | set(past[max(0, len(past) - recent) :])
            margins = [
                dict(
                    zip(past, naive_margin(scores[row, h, :, query][:, past].tolist()), strict=True)
                )
                for h in range(2)
            ]
            wanted = round(
                sum(t in kept or m[t] > -alpha for m in margins for t in past) / len(margins)
            )
            least = min(len(past), recent + sinks)
            count = min(max(wanted, least), max(math.floor(max_fetch * len(past)), least))
            if len(past) < min_context:
                count = len(past)
            for head in range(2):
                chosen = set(mask[row, head, query].nonzero().flatten().tolist())
                assert kept <= chosen <= set(past)
                assert len(chosen) == count
                # tokens that are the favourites of one query head each tie
                free = sorted((margins[head][t] for t in set(past) - kept), reverse=True)
                others = sorted((margins[head][t] for t in chosen - kept), reverse=True)
                assert others == free[: count - len(kept)]
