"""Figure 14: prefill and decode latency of every system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from infinigen_kv_lab.bench.run import IDEAL
from infinigen_kv_lab.figures.definition import Figure, Found, Row, Setting, systems
from infinigen_kv_lab.figures.point import Point

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

PAPER_BLOCK: Mapping[str, float] = MappingProxyType(
    {"stream": 18.55, "stream-int4": 9.67, "h2o": 5.0, "infinigen-paper": 1.52, "infinigen": 1.52}
)
"""A block's time over that of ``ideal``, paper, Figure 18."""


class Latency(Figure):
    name = "14"
    title = "Prefill and decode latency by system"
    shows_peers = True
    about = (
        "Every system reads the same prompt and is fed the same tokens, step by step in turns; the "
        "dot is the median step, the line goes up to the 90th percentile. Paging reads its home on "
        "demand; Transformers' caches keep all KV on the device and use no link. The dashed marks "
        "are the paper's ratios (its Figure 18, on a GPU) times the ideal measured here."
    )

    def points(self, setting: Setting) -> list[Point]:
        return [setting.base()]

    def rows(self, setting: Setting, found: Found) -> list[Row]:
        result = found.get(setting.base())
        if result is None:
            return []
        rows = systems(result)
        base = next(row["step_ms"] for row in rows if row["system"] == IDEAL)
        for row in rows:
            ratio = PAPER_BLOCK.get(row["system"])
            row["ratio_to_ideal"] = row["step_ms"] / base
            row["paper_ratio_to_ideal"] = ratio
        return sorted(rows, key=lambda row: -row["step_ms"])

    def remarks(self, setting: Setting, rows: Sequence[Row]) -> list[str]:
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
        from infinigen_kv_lab.figures.drawing import brief, marks, name_axes, plain_log

        axes = canvas.panels(1, 2, height=1.7 + 0.27 * len(rows), sharey=True)
        prompt, step = axes[0]
        places = range(len(rows))
        for place, row in zip(places, rows, strict=True):
            style = canvas.style(row["system"])
            self._dot(prompt, place, row["prompt_s"], row["prompt_s"], style)
            self._dot(step, place, row["step_ms"], row["step_ms_p90"], style)
            for axes_, value in ((prompt, row["prompt_s"]), (step, row["step_ms"])):
                axes_.annotate(brief(value), **_beside(place))
        marked = [
            (row["step_ms"] / row["ratio_to_ideal"] * row["paper_ratio_to_ideal"], place)
            for place, row in zip(places, rows, strict=True)
            if row["paper_ratio_to_ideal"] is not None
        ]
        marks(step, marked, "the paper's ratio to ideal")
        prompt.set_yticks(places, [row["system"] for row in rows])
        prompt.set_ylim(-0.6, len(rows) - 0.4)
        prompt.set_xlim(0, 1.08 * max(row["prompt_s"] for row in rows))
        step.set_xscale("log")
        widest = max([row["step_ms_p90"] for row in rows] + [value for value, _ in marked])
        step.set_xlim(0.7 * min(row["step_ms"] for row in rows), 1.3 * widest)
        plain_log(step.xaxis)
        name_axes(prompt, "reading the prompt (s)", "")
        name_axes(step, "one decode step of the batch (ms)", "")
        if marked:
            canvas.legend(step)

    @staticmethod
    def _dot(axes: Any, place: int, value: float, until: float, style: Mapping[str, Any]) -> None:
        axes.plot([value, until], [place, place], color=style["color"], linewidth=2.0)
        axes.plot([value], [place], color=style["color"], marker="o", markersize=7)


def _beside(place: int) -> dict[str, Any]:
    """Where a value is written: in a column right of the panel."""
    return {
        "xy": (1.0, place),
        "xycoords": ("axes fraction", "data"),
        "xytext": (4, 0),
        "textcoords": "offset points",
        "va": "center",
        "fontsize": 9,
    }
