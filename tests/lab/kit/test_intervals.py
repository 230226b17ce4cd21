"""Bootstrap intervals against formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from infinigen_kv_lab.kit.intervals import bootstrap, difference, share


def test_the_interval_of_a_mean_is_that_of_the_normal_approximation() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, size=400)
    found = share(values.tolist(), [1.0] * 400)
    reach = 1.96 * values.std() / math.sqrt(400)
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - reach, abs=0.02)
    assert found.high == pytest.approx(values.mean() + reach, abs=0.02)


def test_a_share_weighs_samples_by_their_size() -> None:
    assert share([1, 9], [10, 10]).value == 0.5
    assert share([1, 90], [10, 90]).value == pytest.approx(0.91)


def test_a_paired_difference_is_narrower_than_what_is_compared() -> None:
    noise = np.random.default_rng(1).normal(0.0, 5.0, size=100)
    first, second = noise + 1.0, noise
    found = difference(first.tolist(), second.tolist(), [1.0] * 100)
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 1.0, 1.0))
    alone = share(first.tolist(), [1.0] * 100)
    assert alone.high - alone.low > 1.0


def test_equal_samples_leave_no_doubt_and_intervals_repeat() -> None:
    same = bootstrap([[2.0, 1.0]] * 5, lambda sums: sums[..., 0] / sums[..., 1])
    assert (same.low, same.high) == (2.0, 2.0)
    rows = [[float(i * i % 7), 1.0] for i in range(9)]
    assert bootstrap(rows, lambda s: s[..., 0]) == bootstrap(rows, lambda s: s[..., 0])


def test_one_sample_has_no_interval_and_none_has_no_value() -> None:
    one = share([3.0], [4.0])
    assert one.value == 0.75 and math.isnan(one.low) and math.isnan(one.high)
    assert math.isnan(share([], []).value)


def test_resamples_without_a_value_do_not_spoil_the_interval() -> None:
    """A resample may draw only samples that asked nothing."""
    found = share([1.0, 0.0, 0.0], [1.0, 0.0, 1.0])
    assert found.value == 0.5
    assert 0.0 <= found.low <= found.high <= 1.0
