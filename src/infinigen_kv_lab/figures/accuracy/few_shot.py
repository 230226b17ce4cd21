"""Figure 11: accuracy of few-shot tasks against the relative size of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infinigen_kv_lab.evals.fewshot import Accuracy
from infinigen_kv_lab.evals.reading import FULL
from infinigen_kv_lab.evals.run import Point
from infinigen_kv_lab.figures.accuracy.figure import AccuracyFigure, Cases, Results
from infinigen_kv_lab.figures.accuracy.setting import AccuracySetting
from infinigen_kv_lab.figures.drawing import Canvas, log_axes, name_axes
from infinigen_kv_lab.figures.rows import Row, names, rows_with, spread
from infinigen_kv_lab.kit.intervals import Estimate, mean_of_means

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

    def cases(self, setting: AccuracySetting) -> Cases:
        cases: Cases = []
        for task in TASKS:
            varied: list[tuple[str, str, dict[str, Any]]] = [("", FULL, {})]
            varied += [
                (f"budget {share:g}", "h2o", {"budget": share})
                for share in setting.scale.task_shares
            ]
            for alpha in setting.scale.task_alphas:
                own = {"alpha": alpha, "max_fetch": CAP}
                paper = {"rehearsal": "paper", **own}
                varied += [
                    (f"alpha {alpha:g}", "infinigen", {"settings": own}),
                    (f"alpha {alpha:g}", "infinigen-paper", {"settings": paper}),
                ]
            cases += [
                (
                    {"task": task, "system": policy, "setting": name},
                    setting.few_shot(task, policy, **changes),
                )
                for name, policy, changes in varied
            ]
        return cases

    def rows(self, setting: AccuracySetting, results: Results) -> list[Row]:
        rows: list[Row] = []
        together: dict[tuple[str, str], list[Point]] = {}
        for columns, measurement in self.cases(setting):
            if measurement in results:
                point = results[measurement][columns["system"]]
                rows.append({**columns, **_measured([point])})
                together.setdefault((columns["system"], columns["setting"]), []).append(point)
        rows += [
            {"task": MEAN, "system": system, "setting": varied, **_measured(points)}
            for (system, varied), points in together.items()
            if len(points) == len(TASKS)
        ]
        return rows

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        panels = canvas.panels(2, 3, height=6.4)
        tasks = names(rows, "task")
        for axes, task in zip(panels.flat, tasks, strict=False):
            mine = rows_with(rows, task=task)
            for row in rows_with(mine, system=FULL):
                canvas.across(axes, row, "accuracy_percent", look=FULL, label="full cache")
            others = [row for row in mine if row["system"] != FULL]
            canvas.curves(axes, others, "fetched_percent", "accuracy_percent")
            log_axes(axes, "x")
            name_axes(axes, "attended to (%)", "accuracy (%)", title=task)
        for axes in panels.flat[len(tasks) :]:
            axes.set_visible(False)
        canvas.legend(*panels.flat)


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


def _measured(points: Sequence[Point]) -> Row:
    return {
        "fetched_percent": fetched_percent(points),
        **spread("accuracy_percent", accuracy_of(points), 100),
        "documents": sum(_result(point).documents for point in points),
    }
