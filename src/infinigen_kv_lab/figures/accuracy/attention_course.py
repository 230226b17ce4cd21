"""Figure 4: how much the attention over what a policy keeps resembles that over everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinigen_kv_lab.evals.attention import STEPS, Kept
from infinigen_kv_lab.figures.accuracy.definition import (
    EVERYTHING,
    SHARE,
    AccuracyFigure,
    AccuracySetting,
    Found,
    results_of,
    spread,
)
from infinigen_kv_lab.figures.accuracy.trial import Trial
from infinigen_kv_lab.figures.definition import Row, names

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

POLICIES = ("oracle", "infinigen", "h2o")


class AttentionCourse(AccuracyFigure):
    name = "4"
    title = "Attention over what is kept, beside that over the full cache"
    about = (
        f"All policies attend to {SHARE:.0%} of the cached tokens: h2o to those that have not been "
        "evicted by then, infinigen to those of the highest rehearsed scores (and the newest), the "
        "oracle to those of the highest true scores. Shown is the cosine similarity of the full "
        "cache's attention weights with the same weights restricted to what was kept; a dot is "
        f"the mean over {STEPS} decode steps, all heads, and all layers that select but the first."
    ).replace("%", " %")

    def trials(self, setting: AccuracySetting) -> list[Trial]:
        own = {"alpha": EVERYTHING, "max_fetch": SHARE}
        return [
            setting.reading("attention", POLICIES, setting.scale.course, settings=own, budget=SHARE)
        ]

    def rows(self, setting: AccuracySetting, found: Found) -> list[Row]:
        (trial,) = self.trials(setting)
        rows: list[Row] = []
        for policy, result in results_of(found, trial, Kept).items():
            rows += [
                {
                    "system": policy,
                    "step": at * STEPS,
                    **spread("similarity", estimate),
                    "mean_similarity": result.similarity.mean.value,
                    "mean_mass": result.mass.mean.value,
                    "fetched_share": result.fetched_share,
                }
                for at, estimate in enumerate(result.course)
            ]
        return rows

    def remarks(self, setting: AccuracySetting, rows: Sequence[Row]) -> list[str]:
        means = {row["system"]: row for row in rows}
        return [
            f"{name}: mean similarity {row['mean_similarity']:.3f}, {row['mean_mass']:.1%} of the "
            f"attention kept, {row['fetched_share']:.1%} of the tokens.".replace("%", " %")
            for name, row in means.items()
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        from infinigen_kv_lab.figures.accuracy.drawing import curve
        from infinigen_kv_lab.figures.drawing import name_axes

        axes = canvas.panels()[0][0]
        for name in names(rows):
            mine = [row for row in rows if row["system"] == name]
            curve(canvas, axes, mine, "step", "similarity", look=name)
        axes.set_ylim(top=1.0)
        name_axes(axes, "decode step", "cosine similarity with the full cache's attention")
        canvas.legend(axes)
