"""Figure 13: what the skew is worth, and what calibration is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infinigen_kv_lab.evals.perplexity import Perplexity
from infinigen_kv_lab.evals.run import Point
from infinigen_kv_lab.figures.accuracy.evaluation import Points
from infinigen_kv_lab.figures.accuracy.few_shot import TASKS, accuracy_of, fetched_percent
from infinigen_kv_lab.figures.accuracy.figure import AccuracyFigure, Cases
from infinigen_kv_lab.figures.accuracy.setting import SHARE, AccuracySetting, settings_at
from infinigen_kv_lab.figures.drawing import Canvas, log_axes, name_axes
from infinigen_kv_lab.figures.rows import Row, interval, names, spread

VARIANTS = {
    "calibrated": ("infinigen", True, "infinigen"),
    "paper's skew": ("infinigen-paper", True, "infinigen-paper"),
    "no skew": ("infinigen-paper", False, "h2o"),
}
"""By name: the policy, whether it skews, and the system whose look it has."""
LOOKS = {variant: (variant, look) for variant, (_, _, look) in VARIANTS.items()}

ACCURACY = "accuracy_percent"


class SkewAblation(AccuracyFigure):
    name = "13"
    title = "The rehearsal without a skew, with the paper's, and calibrated"
    about = (
        "All three attend to the same share of the cached tokens. Without a skew and with the "
        "paper's, partial columns of the layer's own query and key are used, chosen by their "
        "magnitude over the prompt, on the previous layer's input; the calibrated rehearsal has a "
        "fitted query and the best score of its rank, and keeps the newest tokens. Below, the "
        f"few-shot tasks at {SHARE:.0%}, which the paper shows with and without the skew. "
        "Vertical lines are intervals."
    ).replace("%", " %")

    def cases(self, setting: AccuracySetting) -> Cases:
        scale = setting.scale
        cases: Cases = []
        for share in scale.shares:
            for variant, (policy, skewed, _) in VARIANTS.items():
                text = setting.at_share(policy, share, scale.sweep, skewed=skewed)
                cases.append(({"task": text.task, "system": variant}, text))
        for task in TASKS:
            for variant, (policy, skewed, _) in VARIANTS.items():
                own = settings_at(policy, SHARE)
                documents = setting.few_shot(task, policy, settings=own, skewed=skewed)
                cases.append(({"task": task, "system": variant}, documents))
        return cases

    def rows_of(self, result: Points) -> list[Row]:
        return [_values(point) for point in result.values()]

    def remarks(self, setting: AccuracySetting, rows: Sequence[Row]) -> list[str]:
        texts = [row for row in rows if row["kl"] is not None]
        shares = [100 * share for share in setting.scale.shares]
        if not texts:
            return []
        near = min(shares, key=lambda share: abs(share - 100 * SHARE))
        found = {}
        for row in sorted(texts, key=lambda row: -abs(row["fetched_percent"] - near)):
            found[row["system"]] = f"{row['system']} {row['kl']:.3f}{interval(row, 'kl')}"
        return [f"KL to the full cache at {near:g} %: {', '.join(found.values())}."]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        texts = [row for row in rows if row["ratio"] is not None]
        tasks = [row for row in rows if row[ACCURACY] is not None]
        parts = [(part, some) for part, some in ((_texts, texts), (_tasks, tasks)) if some]
        panels = canvas.panels(len(parts), 2, height=1.2 + 3.4 * len(parts))
        for (part, some), pair in zip(parts, panels, strict=True):
            part(canvas, pair, some)
        canvas.legend(*panels.flat)


def _texts(canvas: Canvas, pair: Any, rows: Sequence[Row]) -> None:
    labels = ("perplexity over the full cache's", "KL to the full cache (nats)")
    for axes, y, label in zip(pair, ("ratio", "kl"), labels, strict=True):
        canvas.curves(axes, rows, "fetched_percent", y, looks=LOOKS)
        axes.margins(y=0.08)
        log_axes(axes, "xy")
        name_axes(axes, "cached tokens attended to (%)", label)


def _tasks(canvas: Canvas, pair: Any, rows: Sequence[Row]) -> None:
    """Dots with intervals, over the width of both panels."""
    wide, other = pair
    wide.set_subplotspec(wide.get_gridspec()[wide.get_subplotspec().rowspan.start, :])
    other.set_visible(False)
    tasks, variants = names(rows, "task"), names(rows)
    apart = [
        {**row, "place": tasks.index(row["task"]) + 0.2 * (variants.index(row["system"]) - 1)}
        for row in rows
    ]
    canvas.curves(wide, apart, "place", ACCURACY, looks=LOOKS, linestyle="")
    wide.set_xticks(range(len(tasks)), tasks)
    name_axes(wide, f"few-shot task, {100 * SHARE:g} % attended to", "accuracy (%)")


def _values(point: Point) -> dict[str, Any]:
    """Columns of one evaluation, of a text or of a few-shot task."""
    result = point.result
    text = result if isinstance(result, Perplexity) else None
    share = 100 * text.fetched_share if text else fetched_percent([point])
    return {
        "fetched_percent": share,
        **spread("perplexity", text.ppl if text else None),
        **spread("ratio", text.ratio if text else None),
        **spread("kl", text.kl if text else None),
        **spread(ACCURACY, None if text else accuracy_of([point]), 100),
        "samples": point.samples,
    }
