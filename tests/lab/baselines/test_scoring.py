"""Attention of a prompt in blocks, against a plain softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.select import Selection, selection_mask
from infinigen_kv_lab.baselines import scoring
from infinigen_kv_lab.baselines.scoring import Scoring, exact_attention, side_by_side

ROWS, HEADS, GROUP, DIM = 2, 2, 3, 8


def step(start: int, queries: int, visible: Tensor | None) -> Step:
    return Step(
        start=start,
        queries=queries,
        rows=ROWS,
        visible=visible,
        position_ids=torch.arange(start, start + queries)[None],
        selecting=False,
        config=InfiniGenConfig(),
    )


@pytest.mark.parametrize("padding", [(0, 0), (0, 6)])
@pytest.mark.parametrize("start", [0, 9])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(("first", "scratch"), [(0, 1), (0, 2**30), (5, 2000)])
def test_blocks_are_the_whole(
    padding: tuple[int, int],
    start: int,
    softcap: float | None,
    first: int,
    scratch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scoring, "SCRATCH", scratch)
    queries, generator = 14, torch.Generator().manual_seed(3)
    tokens = start + queries
    query = torch.randn(ROWS, HEADS * GROUP, queries, DIM, generator=generator)
    keys = torch.randn(ROWS, HEADS, tokens, DIM, generator=generator)
    real = torch.arange(tokens) >= torch.tensor(padding)[:, None]
    visible = None if padding == (0, 0) else real
    seen = torch.ones(tokens, tokens).tril().bool()[start:]
    seen = seen & real[:, None] & real[:, start:, None]  # (B, Q, S)
    scores = 0.4 * query @ keys.repeat_interleave(GROUP, dim=1).mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen[:, None], -1e30).softmax(-1) * seen[:, None]
    expected = weights.unflatten(1, (HEADS, GROUP)).sum(2)
    covered = torch.zeros(queries, dtype=torch.bool)
    for block, attention in exact_attention(
        query, keys, step(start, queries, visible), Scoring(0.4, softcap), first
    ):
        end = start + block.stop
        assert attention.weights.shape[-1] == end
        assert_close(attention.weights, expected[:, :, block, :end], atol=1e-5, rtol=1e-4)
        want = seen[:, None, block, :end].expand_as(attention.weights)
        assert torch.equal(attention.seen.expand_as(attention.weights), want)
        average = GROUP / seen[:, None, block].sum(-1, keepdim=True).clamp_min(1)
        assert_close(attention.average.expand_as(average), average)
        assert not covered[block].any()
        covered[block] = True
    assert covered.tolist() == [at >= first for at in range(queries)]


def test_selections_side_by_side_are_each_as_it_was() -> None:
    first = Selection(torch.tensor([[[[0, 1]], [[1, 2]]], [[[2, 0]], [[3, 3]]]]), None)
    second = Selection(
        torch.tensor([[[[0, 4, 1]], [[4, 1, 2]]], [[[2, 2, 2]], [[3, 3, 3]]]]),
        torch.tensor([[3], [1]]),
    )
    together = side_by_side([first, second], start=4)
    assert together.counts is not None and together.counts.tolist() == [[2, 3], [2, 1]]
    mask = selection_mask(together, 6)
    chosen = [[[set(q.nonzero().flatten().tolist()) for q in h] for h in row] for row in mask]
    assert chosen == [
        [[{0, 1}, {0, 1, 4}], [{1, 2}, {1, 2, 4}]],
        [[{0, 2}, {2}], [{3}, {3}]],
    ]
