"""Running sums over a prompt against direct computation from all of its tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infinigen_kv.errors import InfiniGenError
from infinigen_kv.rehearsal.lowrank import best_projections
from infinigen_kv.rehearsal.skew import partial_columns, skew_matrix
from infinigen_kv.rehearsal.statistics import (
    POSITION_POWER,
    Magnitudes,
    Moments,
    Projection,
    PromptStatistics,
)

B, H, KV, D, T = 2, 4, 2, 6, 40
RANK = 3
SKEW = skew_matrix(
    (sample := torch.randn(KV, 50, D, generator=torch.Generator().manual_seed(9))).mT @ sample
)


def prompt(seed: int = 0, offset: float = 3.0, tokens: int = T) -> tuple[Tensor, Tensor]:
    """Queries and keys, correlated, with a constant key offset that differs by head."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(2, 1, 1, D, D, generator=generator)
    query = torch.randn(B, H, tokens, D, generator=generator) @ mixing[0]
    key = torch.randn(B, KV, tokens, D, generator=generator) @ mixing[1]
    return query, key + offset * torch.randn(1, KV, 1, D, generator=generator)


def start(kind: str, key: Tensor) -> PromptStatistics:
    return Moments.start(key) if kind == "moments" else Magnitudes.start(key, SKEW)


def observed(
    kind: str,
    query: Tensor,
    key: Tensor,
    weight: Tensor | None = None,
    chunks: list[int] | None = None,
) -> PromptStatistics:
    """The sums of a prompt that arrives in ``chunks``."""
    tokens = key.shape[2]
    real = torch.ones(len(key), tokens) if weight is None else weight
    position = real.cumsum(1) - real
    statistics: PromptStatistics | None = None
    at = 0
    for size in chunks or [tokens]:
        part = slice(at, at + size)
        shown = None if weight is None else weight[:, part]
        if statistics is None:
            statistics = start(kind, key[:, :, part])
        statistics.observe(query[:, :, part], key[:, :, part], position[:, part], shown)
        at += size
    assert statistics is not None
    return statistics


def score(projection: Projection, query: Tensor, key: Tensor) -> Tensor:
    """Rehearsed scores ``(B, H, Tq, Tk)`` less their mean over tokens: all that selection sees."""
    group = query.shape[1] // key.shape[1]
    partial = projection.partial_keys(key).double()
    maps = projection.query.double().repeat_interleave(group, dim=1)
    scores = (query.double() @ maps) @ partial.repeat_interleave(group, dim=1).mT
    return scores - scores.mean(-1, keepdim=True)


def same_score(one: Projection, other: Projection, query: Tensor, key: Tensor) -> None:
    wanted = score(other, query, key)
    torch.testing.assert_close(
        score(one, query, key), wanted, atol=2e-3 * wanted.abs().max().item(), rtol=0.0
    )


def reference(query: Tensor, key: Tensor, rank: int) -> Projection:
    """The calibrated rehearsal from all tokens of one row at once, in float64."""
    weights = (torch.arange(1, key.shape[2] + 1, dtype=torch.float64)) ** POSITION_POWER
    heads = key.shape[1]
    grouped = query.double().view(1, heads, -1, key.shape[2], D)
    moment = torch.einsum("bhgtd,bhgte,t->bhde", grouped, grouped, weights)
    mean = key.double().mean(2, keepdim=True)
    centred = key.double() - mean
    maps = best_projections(moment, centred.mT @ centred, rank)
    return Projection(*maps, mean.float())


@pytest.mark.parametrize("rank", [1, RANK, D])
def test_moments_equal_the_direct_computation(rank: int) -> None:
    query, key = prompt()
    found = observed("moments", query, key).projection(rank)
    for row in range(B):
        one = slice(row, row + 1)
        wanted = reference(query[one], key[one], rank)
        same_score(found.rows(torch.tensor([row])), wanted, query[one], key[one])
        assert found.offset is not None and wanted.offset is not None
        torch.testing.assert_close(found.offset[one], wanted.offset, atol=1e-4, rtol=1e-4)


def test_magnitudes_equal_the_direct_computation() -> None:
    query, key = prompt()
    found = observed("magnitudes", query, key).projection(RANK)
    assert found.offset is None
    for row in range(B):
        for head in range(KV):
            group = query[row, head * 2 : head * 2 + 2].double()
            skewed = group @ SKEW[head].double()
            total = skewed.abs().sum((0, 1)) + (
                key[row, head].double() @ SKEW[head].double()
            ).abs().sum(0)
            columns = sorted(total.topk(RANK).indices.tolist())
            torch.testing.assert_close(found.query[row, head], SKEW[head][:, columns])
            torch.testing.assert_close(found.key[row, head], SKEW[head][:, columns])


@st.composite
def splits(draw: st.DrawFn) -> list[int]:
    cuts = sorted(draw(st.sets(st.integers(1, T - 1), max_size=6)))
    return [end - begin for begin, end in zip([0, *cuts], [*cuts, T], strict=True)]


@pytest.mark.parametrize("kind", ["moments", "magnitudes"])
@given(chunks=splits(), seed=st.integers(0, 20))
def test_any_split_into_chunks_gives_the_same(kind: str, chunks: list[int], seed: int) -> None:
    query, key = prompt(seed)
    whole = observed(kind, query, key).projection(RANK)
    split = observed(kind, query, key, chunks=chunks).projection(RANK)
    same_score(split, whole, query, key)


@pytest.mark.parametrize("offset", [3.0, 1000.0])
@pytest.mark.parametrize("kind", ["moments", "magnitudes"])
@pytest.mark.parametrize("chunks", [[T], [1, T - 1], [7, 20, T - 27], [16, T - 16]])
def test_a_padded_row_equals_the_row_alone(kind: str, chunks: list[int], offset: float) -> None:
    padding = 15  # more than some first chunks: then these hold nothing of the row
    query, key = prompt(offset=offset)
    weight = torch.ones(B, T)
    weight[1, :padding] = 0.0
    padded = observed(kind, query, key, weight, chunks).projection(RANK)
    alone = observed(kind, query[1:, :, padding:], key[1:, :, padding:]).projection(RANK)
    seen = query[1:, :, padding:], key[1:, :, padding:]
    same_score(padded.rows(torch.tensor([1])), alone, *seen)
    unpadded = observed(kind, query[:1], key[:1]).projection(RANK)
    same_score(padded.rows(torch.tensor([0])), unpadded, query[:1], key[:1])


@pytest.mark.parametrize("chunks", [[T], [1, T - 1], [5] * 8])
def test_a_big_constant_key_offset_costs_no_precision(chunks: list[int]) -> None:
    query, key = prompt(offset=0.0)
    shifted = key + 1000.0 * torch.randn(1, KV, 1, D, generator=torch.Generator().manual_seed(4))
    found = observed("moments", query, shifted, chunks=chunks).projection(RANK)
    for row in range(B):
        one = slice(row, row + 1)
        wanted = reference(query[one], shifted[one], RANK)
        same_score(found.rows(torch.tensor([row])), wanted, query[one], shifted[one])


@pytest.mark.parametrize("kind", ["moments", "magnitudes"])
def test_rows_may_be_reordered_and_repeated_midway(kind: str) -> None:
    query, key = prompt()
    order = torch.tensor([1, 1, 0])
    first = observed(kind, query[:, :, :20], key[:, :, :20]).rows(order)
    position = torch.arange(20, T)[None]
    first.observe(query[order][:, :, 20:], key[order][:, :, 20:], position, None)
    whole = observed(kind, query, key).projection(RANK).rows(order)
    same_score(first.projection(RANK), whole, query[order], key[order])


@pytest.mark.parametrize("kind", ["moments", "magnitudes"])
def test_rows_are_copies(kind: str) -> None:
    query, key = prompt()
    statistics = observed(kind, query, key)
    before = statistics.projection(RANK)
    statistics.rows(torch.tensor([0, 1])).observe(
        100 * query, 100 * key, torch.arange(T)[None], None
    )
    same_score(statistics.projection(RANK), before, query, key)


@pytest.mark.parametrize("late_half", [slice(0, D // 2), slice(D // 2, D)])
def test_late_queries_count_most(late_half: slice) -> None:
    """Early and late queries use a half of the dimensions each, and the rank covers one half."""
    query, key = prompt(offset=0.0)
    late_only = torch.zeros(D)
    late_only[late_half] = 1.0
    query[:, :, T // 2 :] = query[:, :, : T // 2]  # so that only their place tells them apart
    query[:, :, : T // 2] *= 1 - late_only
    query[:, :, T // 2 :] *= late_only
    found = observed("moments", query, key).projection(D // 2)
    identity = torch.eye(D).expand(B, KV, D, D)

    def error(part: Tensor) -> float:
        true = score(Projection(identity, identity, None), part, key)
        return ((score(found, part, key) - true).square().mean() / true.square().mean()).item()

    assert error(query[:, :, T // 2 :]) < error(query[:, :, : T // 2])


@pytest.mark.parametrize(
    "break_it",
    [
        lambda query, key: query.view(-1)[5:6].fill_(float("nan")),
        lambda query, key: key.view(-1)[7:8].fill_(float("nan")),
        lambda query, key: key.view(-1)[7:8].fill_(float("inf")),
    ],
)
def test_nan_or_infinity_is_a_clear_error(break_it: Callable[[Tensor, Tensor], object]) -> None:
    query, key = prompt()
    break_it(query, key)
    with pytest.raises(InfiniGenError, match=r"NaN or infinity.*check the model's weights"):
        observed("moments", query, key).projection(RANK)


@pytest.mark.parametrize("rank", [RANK, D])
def test_one_token_is_enough_for_a_finite_score(rank: int) -> None:
    query, key = prompt(tokens=1)
    projection = observed("moments", query, key).projection(rank)
    later = prompt(seed=1)[1]
    assert score(projection, query, later).isfinite().all()
    if rank == D:
        exact = query.double() @ later.double().repeat_interleave(2, dim=1).mT
        exact = exact - exact.mean(-1, keepdim=True)
        torch.testing.assert_close(score(projection, query, later), exact, atol=1e-3, rtol=1e-4)


def test_partial_keys_keep_the_dtype_and_the_centre() -> None:
    query, key = prompt(offset=50.0)
    projection = observed("moments", query, key).projection(RANK)
    partial = projection.partial_keys(key.bfloat16())
    assert partial.dtype == torch.bfloat16
    assert partial.shape == (B, KV, T, RANK)
    # centred before they are rounded to bfloat16, whose step at 50 would be 0.25
    torch.testing.assert_close(
        projection.partial_keys(key).mean(2), torch.zeros(B, KV, RANK), atol=1e-3, rtol=0.0
    )


def test_with_rows_keeps_the_old_projection_of_the_marked_rows() -> None:
    old = observed("moments", *prompt(0)).projection(RANK)
    new = observed("moments", *prompt(1)).projection(RANK)
    mixed = new.with_rows(torch.tensor([True, False]), old)
    for name in ("query", "key", "offset"):
        assert torch.equal(getattr(mixed, name)[0], getattr(old, name)[0])
        assert torch.equal(getattr(mixed, name)[1], getattr(new, name)[1])


def test_columns_without_offset_mix_too() -> None:
    old = observed("magnitudes", *prompt(0)).projection(RANK)
    mixed = old.with_rows(torch.tensor([True, False]), old)
    assert mixed.offset is None
    assert torch.equal(mixed.key, old.key)
    assert partial_columns(torch.ones(1, D), torch.ones(1, D), D).tolist() == [list(range(D))]
