"""Figure 11: accuracy of few-shot tasks against the relative size of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from infinigen_kv_lab.evals.fewshot import Accuracy
from infinigen_kv_lab.evals.reading import FULL
from infinigen_kv_lab.evals.run import Point
from infinigen_kv_lab.evals.task import TaskOptions
from infinigen_kv_lab.figures.accuracy.definition import (
    AccuracyFigure,
    AccuracySetting,
    Found,
    spread,
)
from infinigen_kv_lab.figures.accuracy.trial import Trial
from infinigen_kv_lab.figures.definition import Row, names
from infinigen_kv_lab.kit.intervals import Estimate, mean_of_means

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

TASKS = ("copa", "openbookqa", "winogrande", "piqa", "rte")
MEAN = "mean of the tasks"
METRIC = "acc"
CAP = 0.5  # largest share that infinigen may attend to here, where alpha varies


class FewShot(AccuracyFigure):
    name = "11"
    title = "Accuracy of few-shot tasks against the KV cache that is attended to"
    about = (
        "Selection works on every position after the first 128 of a prompt. The budget varies for "
        "h2o, alpha for infinigen and for the paper's own rehearsal. Vertical lines are intervals; "
        "those of the mean come from resampling every task's documents. Through "
        "lm-evaluation-harness."
    )

    def trials(self, setting: AccuracySetting) -> list[Trial]:
        return [trial for task in TASKS for _, trial in self._made(setting, task)]

    @staticmethod
    def _made(setting: AccuracySetting, task: str) -> list[tuple[str, Trial]]:
        """What varies, and the trial."""
        options = few_shot_options(setting)
        documents = setting.scale.documents
        full = setting.trial(task, (FULL,), options, documents)
        budgets = [
            (
                f"budget {share:g}",
                setting.trial(task, ("h2o",), options, documents, budget=share),
            )
            for share in setting.scale.task_shares
        ]
        alphas = []
        for alpha in setting.scale.task_alphas:
            own = {"alpha": alpha, "max_fetch": CAP}
            for policy, settings in (
                ("infinigen", own),
                ("infinigen-paper", {"rehearsal": "paper", **own}),
            ):
                trial = setting.trial(task, (policy,), options, documents, settings=settings)
                alphas.append((f"alpha {alpha:g}", trial))
        return [("", full), *budgets, *alphas]

    def rows(self, setting: AccuracySetting, found: Found) -> list[Row]:
        rows: list[Row] = []
        together: dict[tuple[str, str], list[Point]] = {}
        for task in TASKS:
            for varied, trial in self._made(setting, task):
                for name, point in found.get(trial, {}).items():
                    rows.append(_row(task, name, varied, [point]))
                    together.setdefault((name, varied), []).append(point)
        rows += [
            _row(MEAN, name, varied, points)
            for (name, varied), points in together.items()
            if len(points) == len(TASKS)
        ]
        return rows

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        from infinigen_kv_lab.figures.accuracy.drawing import curve, full_line
        from infinigen_kv_lab.figures.drawing import name_axes, plain_log

        panels = canvas.panels(2, 3, height=6.4)
        tasks = list(dict.fromkeys(row["task"] for row in rows))
        for axes, task in zip(panels.flat, tasks, strict=False):
            mine = [row for row in rows if row["task"] == task]
            for name in names(mine):
                some = [row for row in mine if row["system"] == name]
                if name == FULL:
                    full_line(canvas, axes, some[0], "accuracy_percent")
                else:
                    curve(canvas, axes, some, "fetched_percent", "accuracy_percent", look=name)
            axes.set_xscale("log")
            plain_log(axes.xaxis)
            name_axes(axes, "attended to (%)", "accuracy (%)", title=task)
        for axes in panels.flat[len(tasks) :]:
            axes.set_visible(False)
        canvas.legend(*panels.flat)


def few_shot_options(setting: AccuracySetting) -> TaskOptions:
    """Settings of all few-shot tasks."""
    return TaskOptions(shots=setting.scale.shots)


def accuracy_of(points: Sequence[Point]) -> Estimate:
    """Accuracy of one task, or the mean over several."""
    results = [_result(point) for point in points]
    if len(results) == 1:
        return results[0].metrics[METRIC]
    return mean_of_means([result.by_document[METRIC] for result in results])


def fetched_percent(points: Sequence[Point]) -> float:
    """What was attended to, of the cached tokens."""
    shares = [_result(point).fetched_share for point in points]
    return 100 * sum(shares) / len(shares)


def _result(point: Point) -> Accuracy:
    assert isinstance(point.result, Accuracy)
    return point.result


def _row(task: str, system: str, varied: str, points: Sequence[Point]) -> Row:
    measured: Mapping[str, float | None] = spread("accuracy_percent", accuracy_of(points), 100)
    return {
        "task": task,
        "system": system,
        "setting": varied,
        "fetched_percent": fetched_percent(points),
        **measured,
        "documents": sum(_result(point).documents for point in points),
    }
