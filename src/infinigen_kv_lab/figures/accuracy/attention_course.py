"""Figure 4: how much the attention over what a policy keeps resembles that over everything."""

from __future__ import annotations

from collections.abc import Sequence

from infinigen_kv_lab.evals.attention import STEPS, Kept
from infinigen_kv_lab.figures.accuracy.evaluation import Points
from infinigen_kv_lab.figures.accuracy.figure import AccuracyFigure, Cases, results_of
from infinigen_kv_lab.figures.accuracy.setting import SHARE, AccuracySetting, settings_at
from infinigen_kv_lab.figures.drawing import Canvas, name_axes
from infinigen_kv_lab.figures.rows import Row, spread

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

    def cases(self, setting: AccuracySetting) -> Cases:
        own = settings_at("infinigen", SHARE)
        span = setting.scale.course
        return [({}, setting.reading("attention", POLICIES, span, settings=own, budget=SHARE))]

    def rows_of(self, result: Points) -> list[Row]:
        return [
            {
                "system": policy,
                "step": at * STEPS,
                **spread("similarity", estimate),
                "mean_similarity": kept.similarity.mean.value,
                "mean_mass": kept.mass.mean.value,
                "fetched_share": kept.fetched_share,
            }
            for policy, kept in results_of(result, Kept).items()
            for at, estimate in enumerate(kept.course)
        ]

    def remarks(self, setting: AccuracySetting, rows: Sequence[Row]) -> list[str]:
        means = {row["system"]: row for row in rows}
        return [
            f"{name}: mean similarity {row['mean_similarity']:.3f}, {row['mean_mass']:.1%} of the "
            f"attention kept, {row['fetched_share']:.1%} of the tokens.".replace("%", " %")
            for name, row in means.items()
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        axes = canvas.panels()[0][0]
        canvas.curves(axes, rows, "step", "similarity")
        axes.set_ylim(top=1.0)
        name_axes(axes, "decode step", "cosine similarity with the full cache's attention")
        canvas.legend(axes)
