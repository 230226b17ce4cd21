"""The mean over few-shot tasks, against plain means and the formula of its spread."""

from __future__ import annotations

import math
import random
from statistics import fmean, pvariance

import pytest

from infinigen_kv_lab.evals.averages import averages
from infinigen_kv_lab.evals.fewshot import Accuracy
from infinigen_kv_lab.evals.run import Point
from infinigen_kv_lab.evals.task import Costs
from infinigen_kv_lab.kit.intervals import Estimate, mean_of_means

NOTHING = Estimate(math.nan, math.nan, math.nan)
COSTS = Costs(None, None, 0.0, 0, 0)
CHANCE = random.Random(5)
SIZES = (300, 60, 150)


def draws(count: int, right: float) -> tuple[float, ...]:
    return tuple(float(CHANCE.random() < right) for _ in range(count))


OURS = [draws(size, right) for size, right in zip(SIZES, (0.8, 0.5, 0.6), strict=True)]
FULL = [draws(size, 0.7) for size in SIZES]


def spread(groups: list[list[float]]) -> float:
    """Standard error of a mean of means."""
    parts = [pvariance(group) / len(group) for group in groups]
    return math.sqrt(sum(parts)) / len(groups)


def point(
    task: str,
    policy: str,
    ours: tuple[float, ...],
    full: tuple[float, ...] | None = None,
    fetched: float = 0.1,
) -> Point:
    result = Accuracy(
        documents=len(ours),
        selecting=len(ours),
        metrics={"acc": NOTHING},
        differences={},
        fetched_share=fetched,
        fetched_share_all_layers=fetched,
        costs=COSTS,
        by_document={"acc": ours},
        full_by_document={} if full is None else {"acc": full},
    )
    return Point(task, policy, {}, len(ours), len(ours), 1.0, result)


def check(found: Estimate, groups: list[list[float]]) -> None:
    """The value is exact, and the interval that of a normal distribution with this spread."""
    value, error = fmean(fmean(group) for group in groups), 1.96 * spread(groups)
    assert found.value == pytest.approx(value)
    assert found.low == pytest.approx(value - error, abs=0.1 * error)
    assert found.high == pytest.approx(value + error, abs=0.1 * error)


def test_tasks_weigh_the_same_and_documents_are_paired() -> None:
    names = ("copa", "rte", "piqa")
    points = [point(name, "ideal", full) for name, full in zip(names, FULL, strict=True)]
    shares = (0.1, math.nan, 0.2)
    points += [
        point(name, "infinigen", ours, full, share)
        for name, ours, full, share in zip(names, OURS, FULL, shares, strict=True)
    ]
    full, ours = averages(points)
    assert (full.policy, ours.policy) == ("ideal", "infinigen")
    assert ours.tasks == names and ours.documents == sum(SIZES)
    check(ours.accuracy, [list(each) for each in OURS])
    apart = [
        [a - b for a, b in zip(first, second, strict=True)]
        for first, second in zip(OURS, FULL, strict=True)
    ]
    assert ours.difference is not None and full.difference is None
    check(ours.difference, apart)
    assert ours.fetched_share == pytest.approx(0.15)


def test_one_task_has_no_mean() -> None:
    assert averages([point("copa", "ideal", OURS[0]), point("rte", "infinigen", OURS[1])]) == []


def test_tasks_without_the_full_cache_have_no_difference() -> None:
    points = [point("copa", "infinigen", OURS[0], FULL[0]), point("rte", "infinigen", OURS[1])]
    (found,) = averages(points)
    assert found.difference is None and found.to_dict()["tasks"] == ["copa", "rte"]


def test_groups_that_leave_no_interval() -> None:
    assert math.isnan(mean_of_means([]).value)
    found = mean_of_means([[1.0], [0.0], []])
    assert found.value == 0.5 and math.isnan(found.low) and math.isnan(found.high)


def test_documents_are_not_in_the_json() -> None:
    values = point("copa", "infinigen", OURS[0], FULL[0]).result.to_dict()
    assert not {"by_document", "full_by_document"} & values.keys()
