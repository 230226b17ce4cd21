"""The skew against an SVD of the queries, the partial columns against a loop."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infinigen_kv.rehearsal.skew import partial_columns, skew_matrix, take_columns


def sample(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers with a spread of scales on the last axis, so that an SVD is unambiguous."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(1, -1, shape[-1], dtype=torch.float64)
    mixing = torch.linalg.qr(
        torch.randn(shape[-1], shape[-1], generator=generator, dtype=torch.float64)
    ).Q
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scales) @ mixing


def test_skew_holds_the_right_singular_vectors_of_the_queries() -> None:
    queries = sample(3, 200, 8)
    skew = skew_matrix(queries.mT @ queries)
    right = torch.linalg.svd(queries, full_matrices=False).Vh.mT
    assert skew.dtype == torch.float32
    for head in range(3):
        agreement = (skew[head].double().T @ right[head]).abs()
        torch.testing.assert_close(
            agreement, torch.eye(8, dtype=torch.float64), atol=1e-5, rtol=0.0
        )


def test_skew_is_orthogonal_and_leaves_scores_unchanged() -> None:
    queries, keys = sample(2, 50, 16), sample(2, 70, 16, seed=1)
    skew = skew_matrix(queries.mT @ queries).double()
    identity = torch.eye(16, dtype=torch.float64).expand(2, 16, 16)
    torch.testing.assert_close(skew.mT @ skew, identity, atol=1e-6, rtol=0.0)
    torch.testing.assert_close(
        (queries @ skew) @ (keys @ skew).mT, queries @ keys.mT, atol=1e-4, rtol=1e-5
    )


def test_skewed_queries_fall_in_energy_from_column_to_column() -> None:
    queries = sample(1, 300, 8)
    skewed = queries @ skew_matrix(queries.mT @ queries).double()
    energy = skewed.square().sum(1)[0]
    singular = torch.linalg.svdvals(queries)[0]
    torch.testing.assert_close(energy, singular.square(), rtol=1e-4, atol=0.0)


def test_a_moment_without_full_rank_still_gives_an_orthogonal_matrix() -> None:
    one = torch.zeros(2, 6, 6)
    one[0, 2, 2] = 3.0  # the other is all zeros
    skew = skew_matrix(one)
    torch.testing.assert_close(skew.mT @ skew, torch.eye(6).expand(2, 6, 6), atol=1e-6, rtol=0.0)
    assert skew[0, :, 0].abs().argmax() == 2


@given(
    batch=st.integers(1, 3),
    dim=st.integers(1, 9),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_partial_columns_equal_a_loop(batch: int, dim: int, seed: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, dim))
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.rand(2, batch, 2, dim, generator=generator)
    columns = partial_columns(query, key, rank)
    for row in range(batch):
        for head in range(2):
            total = [(q + k).item() for q, k in zip(query[row, head], key[row, head], strict=True)]
            best = sorted(range(dim), key=lambda column: -total[column])[:rank]
            assert columns[row, head].tolist() == sorted(best)


def test_take_columns_picks_each_heads_own() -> None:
    matrix = torch.arange(2 * 3 * 3).view(2, 3, 3).float()
    columns = torch.tensor([[[0, 2], [1, 2]], [[0, 1], [0, 2]]])  # (B, H_kv, R)
    taken = take_columns(matrix, columns)
    assert taken.shape == (2, 2, 3, 2)
    for row in range(2):
        for head in range(2):
            expected = matrix[head][:, columns[row, head].tolist()]
            assert torch.equal(taken[row, head], expected)


def test_with_all_columns_the_partial_score_is_exact() -> None:
    queries, keys = sample(2, 20, 8), sample(2, 30, 8, seed=1)
    skew = skew_matrix(queries.mT @ queries).double()
    columns = partial_columns((queries @ skew).abs().sum(1), (keys @ skew).abs().sum(1), 8)
    partial = take_columns(skew, columns)
    torch.testing.assert_close(
        (queries @ partial) @ (keys @ partial).mT, queries @ keys.mT, atol=1e-4, rtol=1e-5
    )
