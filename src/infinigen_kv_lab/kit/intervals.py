"""Bootstrap intervals: over windows, prompts or documents, never over tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 20_240_710

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its interval at `CONFIDENCE`; NaN bounds where one sample leaves none."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.3g}, {self.high:.3g}]"


def bootstrap(rows: Sequence[Sequence[float]], statistic: Callable[[Array], Array]) -> Estimate:
    """Percentile bootstrap of a figure that depends on column sums only.

    Whole rows are drawn, so that what belongs to one sample stays together: the ratio of two sums
    over the same rows is a paired comparison.

    Parameters
    ----------
    rows
        ``(n, k)``: k amounts of each of n samples, e.g. losses with and without selection.
    statistic
        ``(..., k)`` column sums to figures ``(...)``.
    """
    if len(rows) == 0:
        return Estimate(float("nan"), float("nan"), float("nan"))
    table = np.asarray(rows, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(table.sum(axis=0)))
    if len(table) == 1:
        return Estimate(value, float("nan"), float("nan"))
    drawn = np.random.default_rng(SEED).multinomial(
        len(table), np.full(len(table), 1 / len(table)), size=RESAMPLES
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        figures = statistic(drawn @ table)
    outside = (1 - CONFIDENCE) / 2
    figures = figures[np.isfinite(figures)]  # a draw may hold no question at all
    if len(figures) == 0:
        return Estimate(value, float("nan"), float("nan"))
    low, high = np.quantile(figures, [outside, 1 - outside])
    return Estimate(value, float(low), float(high))


def share(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Sum over sum, e.g. right answers over questions."""
    rows = list(zip(numerators, denominators, strict=True))
    return bootstrap(rows, lambda sums: sums[..., 0] / sums[..., 1])


def difference(
    first: Sequence[float], second: Sequence[float], counts: Sequence[float]
) -> Estimate:
    """(sum of first - sum of second) over the sum of counts, paired sample by sample."""
    rows = list(zip(first, second, counts, strict=True))
    return bootstrap(rows, lambda sums: (sums[..., 0] - sums[..., 1]) / sums[..., 2])


def mean_of_means(groups: Sequence[Sequence[float]]) -> Estimate:
    """Mean over groups of each group's mean, e.g. accuracy over tasks.

    The bootstrap is stratified: each resample draws every group's samples anew from that group, so
    the groups weigh the same whatever their sizes. With differences of paired samples the interval
    is that of a paired comparison.
    """
    groups = [group for group in groups if len(group)]
    if not groups:
        return Estimate(float("nan"), float("nan"), float("nan"))
    means = [np.asarray(group, dtype=np.float64).mean() for group in groups]
    value = float(np.mean(means))
    if all(len(group) == 1 for group in groups):
        return Estimate(value, float("nan"), float("nan"))
    generator = np.random.default_rng(SEED)
    drawn = np.zeros(RESAMPLES)
    for group in groups:
        size = len(group)
        counts = generator.multinomial(size, np.full(size, 1 / size), size=RESAMPLES)
        drawn += counts @ np.asarray(group, dtype=np.float64) / (size * len(groups))
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [outside, 1 - outside])
    return Estimate(value, float(low), float(high))
