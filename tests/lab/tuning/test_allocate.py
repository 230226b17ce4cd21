"""Alphas for a wanted KL, against every combination."""

from itertools import product

import numpy as np
import pytest

from infinigen_kv_lab.tuning.allocate import Curves, allocate, uniform


def _curves(seed: int, layers: int = 3) -> Curves:
    """Smooth ones: harm falls with alpha and entries grow, at a rate of each layer's own."""
    random = np.random.default_rng(seed)
    alphas = np.array([1.0, 1.25, 1.5, 2.0])
    fall, grow = random.uniform(0.5, 4, (2, layers, 1))
    harm = random.uniform(0.001, 0.1, (layers, 1)) * np.exp(-fall * alphas)
    entries = random.uniform(1, 100, (layers, 1)) * np.exp(grow * alphas)
    return Curves(alphas, harm, entries)


@pytest.mark.parametrize("seed", range(8))
def test_no_other_alphas_within_the_target_move_much_less(seed: int) -> None:
    curves = _curves(seed)
    fine = curves.refined()
    columns = range(len(fine.alphas))
    combinations = [
        (
            sum(fine.harm[layer, column] for layer, column in enumerate(places)),
            sum(fine.entries[layer, column] for layer, column in enumerate(places)),
        )
        for places in product(columns, repeat=3)
    ]
    target = float(np.median([harm for harm, _ in combinations]))
    found = allocate(curves, target)
    assert found.harm <= target
    best = min(entries for harm, entries in combinations if harm <= target)
    # one price for all layers finds the convex hull; the best may lie one step inside of it
    assert best <= found.entries + 1e-9
    assert found.entries <= 1.35 * best
    hull = [entries for harm, entries in combinations if harm <= found.harm + 1e-15]
    assert found.entries <= min(hull) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_alphas_by_layer_never_move_more_than_one_for_all(seed: int) -> None:
    curves = _curves(seed, layers=6)
    target = 0.5 * float(curves.harm[:, 0].sum() + curves.harm[:, -1].sum())
    single = uniform(curves, target)
    assert len(set(single.alphas)) == 1 and single.harm <= target
    assert allocate(curves, single.harm).entries <= single.entries * (1 + 1e-9)


def test_curves_are_made_monotone_and_keep_what_was_measured() -> None:
    curves = Curves(
        np.array([1.0, 2.0, 3.0]),
        np.array([[0.4, 0.5, 0.1], [0.0, 0.0, 0.0]]),
        np.array([[1.0, 4.0, 3.0], [0.0, 2.0, 8.0]]),
    )
    fine = curves.refined()
    assert fine.alphas[0] == 1.0 and fine.alphas[-1] == 3.0
    at = {alpha: place for place, alpha in enumerate(fine.alphas)}
    assert fine.harm[0, at[2.0]] == pytest.approx(0.4)
    assert fine.harm[0, at[2.5]] == pytest.approx((0.4 * 0.1) ** 0.5)
    assert fine.entries[0, at[3.0]] == pytest.approx(4.0)
    assert max(fine.entries[1, at[1.0]], fine.harm[1].max()) < 1e-20
    assert (np.diff(fine.harm) <= 0).all() and (np.diff(fine.entries) >= 0).all()


def test_a_kl_that_rounding_made_negative_counts_as_none() -> None:
    alphas, entries = np.array([1.0, 2.0]), np.array([[1.0, 4.0]])
    measured = Curves(alphas, np.array([[0.1, -1e-7]]), entries)
    nothing = Curves(alphas, np.array([[0.1, 0.0]]), entries)
    assert (measured.refined().harm == nothing.refined().harm).all()
    assert allocate(measured, 1e-3) == allocate(nothing, 1e-3)


def test_a_target_out_of_reach_takes_the_largest_alphas() -> None:
    curves = _curves(1)
    assert allocate(curves, 1e-9).alphas == (2.0,) * 3
    assert uniform(curves, 1e-9).alphas == (2.0,) * 3
