"""Figure 14: prefill and decode latency of every system."""

from __future__ import annotations

from collections.abc import Sequence

from infinigen_kv_lab.bench.run import IDEAL
from infinigen_kv_lab.figures.drawing import Canvas, brief, log_axes, marks, name_axes
from infinigen_kv_lab.figures.rows import Row
from infinigen_kv_lab.figures.speed.figure import Cases, SpeedFigure, systems
from infinigen_kv_lab.figures.speed.setting import SpeedSetting
from infinigen_kv_lab.points import Result

PAPER_BLOCK = {
    "stream": 18.55,
    "stream-int4": 9.67,
    "h2o": 5.0,
    "infinigen-paper": 1.52,
    "infinigen": 1.52,
}
"""A block's time over that of ``ideal``, paper, Figure 18."""


class Latency(SpeedFigure):
    name = "14"
    title = "Prefill and decode latency by system"
    shows_peers = True
    about = (
        "Every system reads the same prompt and is fed the same tokens, step by step in turns; the "
        "dot is the median step, the line goes up to the 90th percentile. Paging reads its home on "
        "demand; Transformers' caches keep all KV on the device and use no link. The dashed marks "
        "are the paper's ratios (its Figure 18, on a GPU) times the ideal measured here."
    )

    def cases(self, setting: SpeedSetting) -> Cases:
        return [({}, setting.headline())]

    def rows_of(self, result: Result) -> list[Row]:
        rows = systems(result)
        base = next(row["step_ms"] for row in rows if row["system"] == IDEAL)
        for row in rows:
            row["ratio_to_ideal"] = row["step_ms"] / base
            row["paper_ratio_to_ideal"] = PAPER_BLOCK.get(row["system"])
        return sorted(rows, key=lambda row: -row["step_ms"])

    def remarks(self, setting: SpeedSetting, rows: Sequence[Row]) -> list[str]:
        steps = {row["system"]: row["step_ms"] for row in rows}
        return [
            f"infinigen's step is {steps[name] / steps['infinigen']:.2f} times faster than "
            f"that of {name}{said}."
            for name, said in (
                ("stream", ""),
                ("stream-int4", ""),
                ("h2o", " at a budget of 20 % (the paper: 1.63 to 3.00)"),
            )
            if name in steps and "infinigen" in steps
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        axes = canvas.panels(1, 2, height=1.7 + 0.27 * len(rows), sharey=True)
        prompt, step = axes[0]
        places = range(len(rows))
        for panel, column, until in (
            (prompt, "prompt_s", "prompt_s"),
            (step, "step_ms", "step_ms_p90"),
        ):
            values = [row[column] for row in rows]
            colors = [canvas.style(row["system"])["color"] for row in rows]
            panel.hlines(places, values, [row[until] for row in rows], colors, linewidth=2.0)
            panel.scatter(values, places, s=49, c=colors)
            for place, value in zip(places, values, strict=True):  # in a column beside the panel
                at = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
                panel.annotate(brief(value), (1, place), (4, 0), va="center", fontsize=9, **at)
        marked = [
            (row["step_ms"] / row["ratio_to_ideal"] * row["paper_ratio_to_ideal"], place)
            for place, row in zip(places, rows, strict=True)
            if row["paper_ratio_to_ideal"] is not None
        ]
        marks(step, marked, "the paper's ratio to ideal")
        prompt.set_yticks(places, [row["system"] for row in rows])
        prompt.set_ylim(-0.6, len(rows) - 0.4)
        prompt.set_xlim(0, 1.08 * max(row["prompt_s"] for row in rows))
        widest = max([row["step_ms_p90"] for row in rows] + [value for value, _ in marked])
        step.set_xlim(0.7 * min(row["step_ms"] for row in rows), 1.3 * widest)
        log_axes(step, "x")
        name_axes(prompt, "reading the prompt (s)", "")
        name_axes(step, "one decode step of the batch (ms)", "")
        if marked:
            canvas.legend(step)
