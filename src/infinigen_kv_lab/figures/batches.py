"""Figure 15: latency and throughput by batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinigen_kv_lab.figures.definition import (
    Figure,
    Found,
    Row,
    Setting,
    names,
    series,
    systems,
)
from infinigen_kv_lab.figures.point import Point

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

OVER_H2O = (1.63, 3.00)
"""Range of the paper's speed-ups over H2O."""


class Batches(Figure):
    name = "15"
    title = "Latency and throughput by batch size"
    about = (
        "The same link for every batch size. The dashed lines are h2o's throughput here times the "
        "paper's smallest and largest speed-up over H2O."
    )

    def points(self, setting: Setting) -> list[Point]:
        return [setting.sweep(batch=batch) for batch in setting.scale.batches]

    def rows(self, setting: Setting, found: Found) -> list[Row]:
        return [
            {"batch": point.batch, **row}
            for point in self.points(setting)
            if point in found
            for row in systems(found[point])
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        from infinigen_kv_lab.figures.drawing import PAPER, log_ticks, name_axes, plain_log

        axes = canvas.panels(1, 2)
        latency, speed = axes[0]
        for name in names(rows):
            canvas.line(latency, name, *series(rows, name, "batch", "step_ms"))
            canvas.line(speed, name, *series(rows, name, "batch", "tokens_per_s"))
        batches, base = series(rows, "h2o", "batch", "tokens_per_s")
        for factor, dashes in zip(OVER_H2O, ((5, 2), (2, 2)), strict=True):
            label = f"the paper: {factor:.2f} x h2o"
            values = [factor * each for each in base]
            speed.plot(
                batches, values, color=PAPER, linestyle=(0, dashes), linewidth=1.3, label=label
            )
        for each, y in ((latency, "one decode step of the batch (ms)"), (speed, "tokens per s")):
            each.set_xscale("log")
            each.set_yscale("log")
            log_ticks(each.xaxis, [row["batch"] for row in rows])
            plain_log(each.yaxis)
            name_axes(each, "batch (rows)", y)
        canvas.legend(latency, speed)
