"""Figure 13: what the skew is worth, and what calibration is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from infinigen_kv_lab.evals.perplexity import Perplexity
from infinigen_kv_lab.evals.run import Point
from infinigen_kv_lab.figures.accuracy.definition import (
    SHARE,
    AccuracyFigure,
    AccuracySetting,
    Found,
    interval,
    spread,
)
from infinigen_kv_lab.figures.accuracy.equal_share import at_share, settings_at
from infinigen_kv_lab.figures.accuracy.few_shot import (
    TASKS,
    accuracy_of,
    fetched_percent,
    few_shot_options,
)
from infinigen_kv_lab.figures.accuracy.trial import Trial
from infinigen_kv_lab.figures.definition import Row, names

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

VARIANTS: Mapping[str, tuple[str, bool, str]] = MappingProxyType(
    {
        "calibrated": ("infinigen", True, "infinigen"),
        "paper's skew": ("infinigen-paper", True, "infinigen-paper"),
        "no skew": ("infinigen-paper", False, "h2o"),
    }
)
"""By name: the policy, whether it skews, and the system whose look it has."""

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

    def trials(self, setting: AccuracySetting) -> list[Trial]:
        return [trial for _, trial in self._made(setting)]

    @staticmethod
    def _made(setting: AccuracySetting) -> list[tuple[str, Trial]]:
        scale = setting.scale
        made = [
            (variant, at_share(setting, policy, share, scale.sweep, skewed=skewed))
            for share in scale.shares
            for variant, (policy, skewed, _) in VARIANTS.items()
        ]
        options = few_shot_options(setting)
        for task in TASKS:
            for variant, (policy, skewed, _) in VARIANTS.items():
                own = settings_at(policy, SHARE)
                trial = setting.trial(
                    task, (policy,), options, scale.documents, settings=own, skewed=skewed
                )
                made.append((variant, trial))
        return made

    def rows(self, setting: AccuracySetting, found: Found) -> list[Row]:
        return [
            {"task": trial.task, "system": variant, **_values(point)}
            for variant, trial in self._made(setting)
            for point in found.get(trial, {}).values()
        ]

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
        parts = [part for part, some in ((_draw_texts, texts), (_draw_tasks, tasks)) if some]
        panels = canvas.panels(len(parts), 2, height=1.2 + 3.4 * len(parts))
        for part, some, pair in zip(
            parts, [each for each in (texts, tasks) if each], panels, strict=True
        ):
            part(canvas, pair, some)
        canvas.legend(*panels.flat)


def _draw_texts(canvas: Canvas, pair: Any, rows: Sequence[Row]) -> None:
    from infinigen_kv_lab.figures.accuracy.drawing import curve
    from infinigen_kv_lab.figures.drawing import name_axes, plain_log

    labels = ("perplexity over the full cache's", "KL to the full cache (nats)")
    for axes, y, label in zip(pair, ("ratio", "kl"), labels, strict=True):
        for variant in names(rows):
            mine = [row for row in rows if row["system"] == variant]
            look = VARIANTS[variant][2]
            curve(canvas, axes, mine, "fetched_percent", y, look=look, label=variant)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.margins(y=0.08)
        plain_log(axes.xaxis)
        plain_log(axes.yaxis)
        name_axes(axes, "cached tokens attended to (%)", label)


def _draw_tasks(canvas: Canvas, pair: Any, rows: Sequence[Row]) -> None:
    """Dots with intervals, over the width of both panels."""
    from infinigen_kv_lab.figures.accuracy.drawing import curve
    from infinigen_kv_lab.figures.drawing import name_axes

    wide, other = pair
    wide.set_subplotspec(wide.get_gridspec()[wide.get_subplotspec().rowspan.start, :])
    other.set_visible(False)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for number, variant in enumerate(names(rows)):
        mine = [
            {**row, "place": tasks.index(row["task"]) + 0.2 * (number - 1)}
            for row in rows
            if row["system"] == variant
        ]
        look = VARIANTS[variant][2]
        curve(canvas, wide, mine, "place", ACCURACY, look=look, label=variant, joined=False)
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
