"""The rank-R score against its definition: least expected squared error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infinigen_kv.rehearsal.lowrank import best_projections

D = 12


def correlated(tokens: int, seed: int) -> Tensor:
    """``(tokens, D)`` float64 with a covariance of its own, well conditioned."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(D, D, generator=generator, dtype=torch.float64)
    left, scale, right = torch.linalg.svd(mixing)
    mixing = left * scale.clamp_min(0.1 * scale.max()) @ right
    return torch.randn(tokens, D, generator=generator, dtype=torch.float64) @ mixing


@pytest.fixture
def queries() -> Tensor:
    return correlated(300, seed=1)


@pytest.fixture
def keys() -> Tensor:
    centred = correlated(400, seed=2)
    return centred - centred.mean(0)


def squared_error(queries: Tensor, keys: Tensor, query_map: Tensor, key_map: Tensor) -> float:
    """Mean over all pairs of the squared difference to the true score."""
    approximate = (queries @ query_map.double()) @ (keys @ key_map.double()).mT
    return (approximate - queries @ keys.mT).square().mean().item()


def root(moment: Tensor) -> Tensor:
    """Any square root serves: singular values of the product do not depend on the choice."""
    return torch.linalg.cholesky(moment, upper=True)


def test_full_rank_is_exact_up_to_a_constant_per_query(queries: Tensor, keys: Tensor) -> None:
    offset = torch.randn(D, dtype=torch.float64) * 10
    query_map, key_map = best_projections(queries.mT @ queries, keys.mT @ keys, D)
    true = queries @ (keys + offset).mT
    rehearsed = (queries @ query_map.double()) @ (keys @ key_map.double()).mT
    difference = true - rehearsed
    torch.testing.assert_close(
        difference, (queries @ offset)[:, None].expand_as(true), atol=1e-3, rtol=1e-4
    )


@pytest.mark.parametrize("rank", [1, 3, 6, 11])
def test_the_error_is_that_of_eckart_and_young(queries: Tensor, keys: Tensor, rank: int) -> None:
    query_moment, covariance = queries.mT @ queries, keys.mT @ keys
    maps = best_projections(query_moment, covariance, rank)
    singular = torch.linalg.svdvals(root(query_moment) @ root(covariance).mT)
    least = singular[rank:].square().sum().item() / (len(queries) * len(keys))
    assert squared_error(queries, keys, *maps) == pytest.approx(least, rel=1e-4)


@pytest.mark.parametrize("rank", [1, 3, 6, 11])
def test_no_other_projection_of_that_rank_does_better(
    queries: Tensor, keys: Tensor, rank: int
) -> None:
    ours = squared_error(
        queries, keys, *best_projections(queries.mT @ queries, keys.mT @ keys, rank)
    )
    others = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        basis = torch.randn(D, rank, generator=generator, dtype=torch.float64)
        others.append((torch.linalg.qr(basis).Q,) * 2)
    moments = queries.mT @ queries, keys.mT @ keys
    others += [(torch.linalg.eigh(each).eigenvectors[:, -rank:],) * 2 for each in moments]  # PCA
    magnitude = queries.abs().sum(0) + keys.abs().sum(0)
    others.append((torch.eye(D, dtype=torch.float64)[:, magnitude.topk(rank).indices],) * 2)
    assert ours < min(squared_error(queries, keys, *maps) for maps in others)


def test_a_small_change_of_the_projections_never_helps(queries: Tensor, keys: Tensor) -> None:
    query_map, key_map = best_projections(queries.mT @ queries, keys.mT @ keys, 4)
    ours = squared_error(queries, keys, query_map, key_map)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        nudges = [0.02 * torch.randn(D, 4, generator=generator) for _ in range(2)]
        assert squared_error(queries, keys, query_map + nudges[0], key_map + nudges[1]) > ours


@pytest.mark.parametrize("query_scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("key_scale", [1e-12, 1.0, 1e12])
def test_the_score_does_not_depend_on_the_moments_scale(
    queries: Tensor, keys: Tensor, query_scale: float, key_scale: float
) -> None:
    moments = queries.mT @ queries, keys.mT @ keys
    plain = best_projections(*moments, 5)
    scaled = best_projections(query_scale * moments[0], key_scale * moments[1], 5)
    torch.testing.assert_close(
        scaled[0].double() @ scaled[1].double().mT,
        plain[0].double() @ plain[1].double().mT,
        atol=1e-4,
        rtol=1e-4,
    )


def test_leading_axes_are_independent(queries: Tensor, keys: Tensor) -> None:
    moments = torch.stack([queries.mT @ queries, torch.eye(D, dtype=torch.float64)])
    covariances = torch.stack([keys.mT @ keys, keys.mT @ keys])
    together = best_projections(moments, covariances, 3)
    assert [each.shape for each in together] == [(2, D, 3), (2, D, 3)]
    assert all(each.dtype == torch.float32 for each in together)
    for index in range(2):
        alone = best_projections(moments[index], covariances[index], 3)
        torch.testing.assert_close(
            together[0][index] @ together[1][index].mT, alone[0] @ alone[1].mT
        )


@pytest.mark.parametrize("rank", [1, 5, D])
@pytest.mark.parametrize("used", [0, 1, 4])
def test_moments_without_full_rank_give_a_usable_score(
    queries: Tensor, keys: Tensor, rank: int, used: int
) -> None:
    """A short prompt, down to one token, whose keys have no covariance at all."""
    few = keys[:used] - keys[:used].mean(0) if used else keys[:0]
    for query_moment in (queries.mT @ queries, queries[:used].mT @ queries[:used]):
        for covariance in (keys.mT @ keys, few.mT @ few):
            query_map, key_map = best_projections(query_moment, covariance, rank)
            assert query_map.isfinite().all()
            assert key_map.isfinite().all()
            if rank == D:
                torch.testing.assert_close(
                    query_map.double() @ key_map.double().mT,
                    torch.eye(D, dtype=torch.float64),
                    atol=1e-3,
                    rtol=0.0,
                )


def test_a_rank_that_covers_what_the_keys_use_is_exact_for_them(queries: Tensor) -> None:
    basis = torch.linalg.qr(correlated(D, seed=5)[:, :3]).Q
    keys = correlated(200, seed=3)[:, :3] @ basis.mT
    query_map, key_map = best_projections(queries.mT @ queries, keys.mT @ keys, 3)
    relative = squared_error(queries, keys, query_map, key_map) / (queries @ keys.mT).var().item()
    assert relative < 1e-4  # the floor of the eigenvalues blurs the subspace a little
