"""Attention against a float64 loop over rows, heads and queries."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from allocations import largest_made
from infinigen_kv.attention import dense as attention
from infinigen_kv.attention.dense import (
    causal_mask,
    decode_attention,
    dense_attention,
    grouped_scores,
)

SCALING = 0.3
SOFTCAP = 2.0
D, D_V = 8, 6


def draw(
    rows: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    queries: int = 5,
    tokens: int = 9,
    value_dim: int = D_V,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(rows, heads, queries, D, generator=generator) * 2,
        torch.randn(rows, kv_heads, tokens, D, generator=generator),
        torch.randn(rows, kv_heads, tokens, value_dim, generator=generator),
    )


def naive_scores(query: Tensor, keys: Tensor, softcap: float | None) -> list[float]:
    """Of one query ``(D,)`` and keys ``(S, D)``."""
    scores = [SCALING * sum((query * key).tolist()) for key in keys.double()]
    if softcap is not None:
        scores = [softcap * math.tanh(score / softcap) for score in scores]
    return scores


def naive(
    query: Tensor, keys: Tensor, values: Tensor, softcap: float | None, mask: Tensor
) -> Tensor:
    """``(B, Q, H, D_v)``, float64; ``mask`` boolean, broadcastable to ``(B, H_kv, Q, S)``."""
    rows, heads, queries, _ = query.shape
    kv_heads, tokens = keys.shape[1:3]
    mask = mask.expand(rows, kv_heads, queries, tokens)
    output = torch.zeros(rows, queries, heads, values.shape[-1], dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            shared = head // (heads // kv_heads)
            for place in range(queries):
                scores = naive_scores(query[row, head, place].double(), keys[row, shared], softcap)
                seen = [t for t in range(tokens) if mask[row, shared, place, t]]
                weights = {t: math.exp(scores[t]) for t in seen}
                for t in seen:
                    share = weights[t] / sum(weights.values())
                    output[row, place, head] += share * values[row, shared, t].double()
    return output


def some_mask(*shape: int) -> Tensor:
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[..., 0, :] = False  # the first query of everyone sees nothing
    return mask


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, SOFTCAP])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 2), (3, 3), (4, 1)])
def test_decode_attention_of_everything(heads: int, kv_heads: int, softcap: float | None) -> None:
    query, keys, values = draw(heads=heads, kv_heads=kv_heads, queries=1)
    found = decode_attention(query, keys, values, scaling=SCALING, softcap=softcap)
    close(found, naive(query, keys, values, softcap, torch.tensor(True)))


@pytest.mark.parametrize("softcap", [None, SOFTCAP])
@pytest.mark.parametrize("shape", [(2, 2, 1, 9), (2, 1, 1, 9), (1, 1, 1, 9)])
def test_decode_attention_of_the_visible(shape: tuple[int, ...], softcap: float | None) -> None:
    query, keys, values = draw(queries=1)
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.5
    assert 0 < visible.sum() < visible.numel()
    found = decode_attention(query, keys, values, scaling=SCALING, softcap=softcap, visible=visible)
    close(found, naive(query, keys, values, softcap, visible))


@pytest.mark.parametrize("softcap", [None, SOFTCAP])
def test_a_row_that_sees_nothing_gets_zeros(softcap: float | None) -> None:
    query, keys, values = draw(queries=1)
    visible = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    visible[1] = False
    found = decode_attention(query, keys, values, scaling=SCALING, softcap=softcap, visible=visible)
    assert torch.equal(found[1], torch.zeros_like(found[1]))
    close(found, naive(query, keys, values, softcap, visible))


@pytest.mark.parametrize("softcap", [None, SOFTCAP])
@pytest.mark.parametrize("value_dim", [D, D_V])  # the fused kernel takes only one width
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 2), (3, 1)])
@pytest.mark.parametrize("queries", [1, 4, 9])
def test_without_a_mask_the_last_queries_see_what_came_before(
    queries: int, heads: int, kv_heads: int, value_dim: int, softcap: float | None
) -> None:
    query, keys, values = draw(heads=heads, kv_heads=kv_heads, queries=queries, value_dim=value_dim)
    earlier = torch.tensor(
        [[token <= 9 - queries + place for token in range(9)] for place in range(queries)]
    )
    assert torch.equal(causal_mask(queries, 9, torch.device("cpu"))[0, 0], earlier)
    found = dense_attention(query, keys, values, scaling=SCALING, softcap=softcap)
    close(found, naive(query, keys, values, softcap, earlier))


@pytest.mark.parametrize("softcap", [None, SOFTCAP])
@pytest.mark.parametrize("value_dim", [D, D_V])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3)])
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("rows", [1, 2])
def test_masks_and_queries_that_see_nothing(
    rows: int, per_head: bool, heads: int, kv_heads: int, value_dim: int, softcap: float | None
) -> None:
    query, keys, values = draw(heads=heads, kv_heads=kv_heads, value_dim=value_dim)
    mask = some_mask(rows, kv_heads if per_head else 1, 5, 9)
    found = dense_attention(query, keys, values, scaling=SCALING, softcap=softcap, mask=mask)
    assert torch.equal(found[:, 0], torch.zeros_like(found[:, 0]))
    close(found, naive(query, keys, values, softcap, mask))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two or three queries at once, so that five make several blocks and a remainder."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 2)
    monkeypatch.setattr(attention, "SCORES", 3 * 2 * 4 * 9)


@pytest.mark.parametrize("softcap", [None, SOFTCAP])
@pytest.mark.usefixtures("small_blocks")
def test_a_mask_may_be_shared_by_all_queries(softcap: float | None) -> None:
    query, keys, values = draw()
    mask = torch.tensor([1, 1, 0, 0, 1, 0, 1, 0, 1], dtype=torch.bool).view(1, 1, 1, 9)
    found = dense_attention(query, keys, values, scaling=SCALING, softcap=softcap, mask=mask)
    close(found, naive(query, keys, values, softcap, mask))


@pytest.mark.parametrize("softcap", [None, SOFTCAP])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.usefixtures("small_blocks")
def test_several_blocks_of_queries(masked: bool, softcap: float | None) -> None:
    query, keys, values = draw()
    mask = some_mask(2, 1, 5, 9) if masked else None
    found = dense_attention(query, keys, values, scaling=SCALING, softcap=softcap, mask=mask)
    seen = causal_mask(5, 9, query.device) if mask is None else mask
    close(found, naive(query, keys, values, softcap, seen))


def test_a_later_piece_in_half_precision_and_from_a_larger_buffer() -> None:
    query, keys, values = draw(rows=2, heads=6, kv_heads=2, value_dim=D)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)  # as a projection leaves it
    keys, values = (torch.cat([each, each], dim=2)[:, :, :9] for each in (keys, values))
    expected = naive(query, keys, values, None, causal_mask(5, 9, query.device))
    close(dense_attention(query, keys, values, scaling=SCALING), expected)
    found = dense_attention(query.bfloat16(), keys.bfloat16(), values.bfloat16(), scaling=SCALING)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, atol=0.05, rtol=0.05)


def test_scores_of_a_later_piece_may_be_far_beyond_the_range_of_exp() -> None:
    """In either part, the earlier tokens or the piece itself, and in both."""
    query, keys, values = draw(rows=1, heads=1, kv_heads=1, queries=2, tokens=4, value_dim=D)
    for loud in ([0], [2], [0, 2], [1, 3]):
        louder = keys.clone()
        louder[:, :, loud] = query[:, :, :1] * 1e3
        found = dense_attention(query, louder, values, scaling=1.0)
        scores = query.double() @ louder.double().mT
        scores = scores.masked_fill(~causal_mask(2, 4, query.device), -torch.inf)
        expected = (scores.softmax(-1) @ values.double()).transpose(1, 2)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_gradients_of_a_later_piece() -> None:
    query, keys, values = draw(value_dim=D)
    leaves = [each.requires_grad_() for each in (query, keys, values)]
    dense_attention(*leaves, scaling=SCALING).square().sum().backward()
    found = [each.grad for each in leaves]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    wide_keys, wide_values = (each.repeat_interleave(2, dim=1) for each in exact[1:])
    scores = exact[0] @ wide_keys.mT * SCALING
    scores = scores.masked_fill(~causal_mask(5, 9, query.device), -torch.inf)
    (scores.softmax(-1) @ wide_values).square().sum().backward()
    for mine, theirs in zip(found, exact, strict=True):
        assert mine is not None and theirs.grad is not None
        close(mine, theirs.grad)


@pytest.mark.parametrize("case", ["continued", "masked", "per head", "capped", "capped masked"])
def test_nothing_is_made_that_grows_with_group_and_tokens(case: str) -> None:
    """64 queries of 8 heads on 4096 tokens of one KV head: the scores would be 2 M numbers, keys
    for every head as many; keys are 262,144.
    """
    queries, tokens, heads, dim = 64, 4096, 8, 64
    query = torch.randn(1, heads, queries, dim)
    keys, values = torch.randn(2, 1, 1, tokens, dim).unbind(0)
    mask = causal_mask(queries, tokens, query.device) if "masked" in case else None
    if case == "per head":
        mask = causal_mask(queries, tokens, query.device).expand(1, 1, -1, -1)
    softcap = SOFTCAP if "capped" in case else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SCORES", 8 * heads * tokens)
        with largest_made() as found:
            dense_attention(query, keys, values, scaling=SCALING, softcap=softcap, mask=mask)
    numbers = {
        "continued": heads * queries * dim,
        "masked": queries * tokens,
        "per head": queries * tokens,
    }.get(case, 8 * heads * tokens)
    assert 0 < found.nbytes <= 4 * numbers, found


@pytest.mark.parametrize("softcap", [None, SOFTCAP])
@pytest.mark.parametrize("queries", [1, 5])
def test_no_dropout_unless_asked_for(queries: int, softcap: float | None) -> None:
    query, keys, values = draw(queries=queries)
    options: dict[str, Any] = {"scaling": SCALING, "softcap": softcap}
    plain = dense_attention(query, keys, values, **options)
    assert torch.equal(plain, dense_attention(query, keys, values, **options))
    torch.manual_seed(0)
    dropped = dense_attention(query, keys, values, **options, dropout=0.5)
    assert not torch.allclose(dropped, plain, atol=1e-3)


def test_half_precision_keeps_its_dtype() -> None:
    query, keys, values = (each.bfloat16() for each in draw(queries=1))
    for softcap in (None, SOFTCAP):
        for mask in (None, torch.ones(1, 1, 1, 9, dtype=torch.bool)):
            found = dense_attention(
                query, keys, values, scaling=SCALING, softcap=softcap, mask=mask
            )
            assert found.dtype == torch.bfloat16
            expected = naive(query, keys, values, softcap, torch.tensor(True))
            torch.testing.assert_close(found.double(), expected, atol=0.05, rtol=0.05)


def test_scores_far_beyond_the_range_of_exp_stay_finite() -> None:
    query, keys, values = draw(queries=1)
    found = decode_attention(query * 1e4, keys, values, scaling=1.0)
    assert found.isfinite().all()


@pytest.mark.parametrize("softcap", [None, SOFTCAP])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("queries", [1, 5, 9])
def test_the_nan_of_a_broken_model_is_not_hidden(
    queries: int, masked: bool, softcap: float | None
) -> None:
    query, keys, values = draw(queries=queries, value_dim=D)
    query[0, 0] = float("nan")
    mask = causal_mask(queries, 9, query.device) if masked else None
    found = dense_attention(query, keys, values, scaling=SCALING, softcap=softcap, mask=mask)
    assert found[0, :, 0].isnan().all()
    assert found[1].isfinite().all()


@pytest.mark.parametrize("softcap", [None, SOFTCAP])
def test_grouped_scores_equal_a_loop(softcap: float | None) -> None:
    query, keys, _ = draw()
    scores = grouped_scores(query, keys, SCALING, softcap)
    assert scores.shape == (2, 2, 2, 5, 9)
    for row in range(2):
        for head in range(4):
            for place in range(5):
                expected = naive_scores(
                    query[row, head, place].double(), keys[row, head // 2], softcap
                )
                found = scores[row, head // 2, head % 2, place].tolist()
                assert found == pytest.approx(expected, abs=1e-5)
