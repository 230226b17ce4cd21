"""The mean over several few-shot tasks, policy by policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from infinigen_kv.files import plain
from infinigen_kv_lab.evals.fewshot import Accuracy
from infinigen_kv_lab.evals.run import Point
from infinigen_kv_lab.evals.task import percent
from infinigen_kv_lab.kit.intervals import Estimate, mean_of_means

METRIC = "acc"


@dataclass(frozen=True, slots=True)
class Average:
    """Accuracy of one policy over tasks, which weigh the same.

    ``difference`` is that to the full cache on the same documents, None where it was not measured.
    The intervals are by bootstrap over documents within each task. ``fetched_share`` is the mean
    over the tasks where steps selected.
    """

    policy: str
    tasks: tuple[str, ...]
    documents: int
    accuracy: Estimate
    difference: Estimate | None
    fetched_share: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return plain(asdict(self))

    def headline(self) -> dict[str, str]:
        """The figures by name, to read."""
        return {
            "tasks": str(len(self.tasks)),
            "accuracy": str(self.accuracy),
            "less full": "-" if self.difference is None else str(self.difference),
            "fetched": percent(self.fetched_share),
        }


def averages(points: Sequence[Point]) -> list[Average]:
    """One for each policy that was measured on two tasks or more with `METRIC`."""
    found = []
    for policy in dict.fromkeys(point.policy for point in points):
        mine = {
            point.task: point.result
            for point in points
            if point.policy == policy
            and isinstance(point.result, Accuracy)
            and METRIC in point.result.by_document
        }
        if len(mine) > 1:
            found.append(_average(policy, mine))
    return found


def _average(policy: str, results: dict[str, Accuracy]) -> Average:
    ours = [each.by_document[METRIC] for each in results.values()]
    full = [each.full_by_document.get(METRIC) for each in results.values()]
    apart = None
    if all(each is not None for each in full):
        apart = mean_of_means(
            [
                [a - b for a, b in zip(first, second, strict=True)]
                for first, second in zip(ours, full, strict=True)
                if second is not None
            ]
        )
    shares = [each.fetched_share for each in results.values()]
    shares = [each for each in shares if not math.isnan(each)]
    return Average(
        policy=policy,
        tasks=tuple(results),
        documents=sum(len(each) for each in ours),
        accuracy=mean_of_means(ours),
        difference=apart,
        fetched_share=sum(shares) / len(shares) if shares else float("nan"),
    )
