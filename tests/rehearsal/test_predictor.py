"""The fitted query predictor against least squares and SVDs in float64 numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from infinigen_kv.rehearsal.predictor import RIDGE, fit_correction

Matrix = npt.NDArray[Any]
M, N, TOKENS = 7, 10, 120


@dataclass
class Problem:
    """Sample inputs ``x`` ``(TOKENS, M)``, targets ``q`` ``(TOKENS, N)``, own weights."""

    x: Matrix
    q: Matrix
    weight: Matrix  # (N, M)
    bias: Matrix | None

    @property
    def augmented(self) -> Matrix:
        """``[x 1]``."""
        return np.hstack([self.x, np.ones((len(self.x), 1))])

    @property
    def own(self) -> Matrix:
        """Own weights as a map of ``[x 1]``, ``(M+1, N)``."""
        bias = np.zeros(N) if self.bias is None else self.bias
        return np.vstack([self.weight.T, bias])

    def ridge(self) -> Matrix:
        """``argmin ||[x 1] W - q||^2 + lambda ||W - W_Q||^2`` as one least-squares problem."""
        strength = RIDGE * np.mean(np.diag(self.augmented.T @ self.augmented))
        rows = np.vstack([self.augmented, np.sqrt(strength) * np.eye(M + 1)])
        targets = np.vstack([self.q, np.sqrt(strength) * self.own])
        return np.linalg.lstsq(rows, targets, rcond=None)[0]

    def fit(self, rank: int) -> tuple[Matrix, Matrix]:
        down, up = fit_correction(
            torch.from_numpy(self.augmented.T @ self.augmented),
            torch.from_numpy(self.augmented.T @ self.q),
            torch.from_numpy(self.weight).float(),
            None if self.bias is None else torch.from_numpy(self.bias).float(),
            rank,
        )
        assert down.dtype == up.dtype == torch.float32
        assert (down.shape, up.shape) == ((M + 1, rank), (rank, N))
        return down.double().numpy(), up.double().numpy()


def problem(seed: int = 0, with_bias: bool = True) -> Problem:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(TOKENS, M)) @ draw.normal(size=(M, M)) + draw.normal(size=M)
    q = x @ draw.normal(size=(M, N)) + 2.0 + draw.normal(size=(TOKENS, N))
    weight = draw.normal(size=(N, M)).astype(np.float32).astype(np.float64)
    bias = draw.normal(size=N).astype(np.float32).astype(np.float64)
    return Problem(x, q, weight, bias if with_bias else None)


@pytest.mark.parametrize("with_bias", [True, False])
def test_full_rank_is_the_ridge_solution(with_bias: bool) -> None:
    case = problem(with_bias=with_bias)
    down, up = case.fit(rank=M + 1)
    np.testing.assert_allclose(case.own + down @ up, case.ridge(), atol=1e-5)


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_smaller_rank_changes_the_predictions_least(rank: int, seed: int) -> None:
    case = problem(seed)
    change = case.augmented @ (case.ridge() - case.own)
    left, singular, right = np.linalg.svd(change, full_matrices=False)
    best = left[:, :rank] * singular[:rank] @ right[:rank]
    down, up = case.fit(rank)
    np.testing.assert_allclose(case.augmented @ down @ up, best, atol=1e-4)
    missed = np.linalg.norm(case.augmented @ down @ up - change)
    assert missed == pytest.approx(np.linalg.norm(singular[rank:]), rel=1e-4)


@pytest.mark.parametrize("with_bias", [True, False])
def test_a_planted_low_rank_change_is_recovered(with_bias: bool) -> None:
    case = problem(with_bias=with_bias)
    draw = np.random.default_rng(3)
    planted = draw.normal(size=(M + 1, 2)) @ draw.normal(size=(2, N))
    # so many tokens of such size that the pull toward the own weights is weak
    case.x = 30 * draw.normal(size=(5000, M))
    case.q = case.augmented @ (case.own + planted)
    down, up = case.fit(rank=2)
    found = (down @ up)[:-1]
    assert np.linalg.norm(found - planted[:-1]) < 0.03 * np.linalg.norm(planted[:-1])


def test_weights_that_fit_already_need_no_correction() -> None:
    case = problem()
    case.q = case.augmented @ case.own
    down, up = case.fit(rank=4)
    np.testing.assert_allclose(down @ up, 0.0, atol=1e-6)


def test_a_constant_shift_of_the_queries_goes_into_the_bias() -> None:
    case = problem(with_bias=False)
    case.x = 0.1 * (case.x - case.x.mean(0))
    case.q = case.x @ case.weight.T + 5.0
    down, up = case.fit(rank=1)
    np.testing.assert_allclose((down @ up)[-1], 5.0, rtol=0.02)
    np.testing.assert_allclose((down @ up)[:-1], 0.0, atol=1e-3)


def test_fewer_samples_than_inputs_still_fit() -> None:
    case = problem()
    case.x, case.q = case.x[:3], case.q[:3]
    down, up = case.fit(rank=M + 1)
    np.testing.assert_allclose(case.own + down @ up, case.ridge(), atol=1e-5)
