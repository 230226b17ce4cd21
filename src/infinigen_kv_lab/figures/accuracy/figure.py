"""What accuracy figures share: results of evaluations by policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypeVar, cast

from infinigen_kv_lab.evals.task import Result
from infinigen_kv_lab.figures.accuracy.evaluation import Evaluation, Points
from infinigen_kv_lab.figures.accuracy.setting import AccuracySetting
from infinigen_kv_lab.figures.figure import Figure
from infinigen_kv_lab.figures.rows import Row

Cases = list[tuple[Row, Evaluation]]
Results = Mapping[Evaluation, Points]
ResultT = TypeVar("ResultT", bound=Result)


class AccuracyFigure(Figure[AccuracySetting, Evaluation, Points]):
    """A figure made from evaluations; ``intervals`` says whether there are any in the picture."""

    figure_set = "accuracy"
    intervals: ClassVar[bool] = True


def results_of(points: Points, kind: type[ResultT]) -> dict[str, ResultT]:
    """An evaluation's results by policy, which are of this kind."""
    results = {name: point.result for name, point in points.items()}
    assert all(isinstance(each, kind) for each in results.values())
    return cast("dict[str, ResultT]", results)
