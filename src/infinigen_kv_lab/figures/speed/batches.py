"""Figure 15: latency and throughput by batch size."""

from __future__ import annotations

from collections.abc import Sequence

from infinigen_kv_lab.figures.drawing import Canvas, log_axes, name_axes
from infinigen_kv_lab.figures.rows import Row, series
from infinigen_kv_lab.figures.speed.figure import Cases, SpeedFigure, systems
from infinigen_kv_lab.figures.speed.setting import SpeedSetting
from infinigen_kv_lab.figures.styles import PAPER
from infinigen_kv_lab.points import Result

OVER_H2O = (1.63, 3.00)
"""Range of the paper's speed-ups over H2O."""


class Batches(SpeedFigure):
    name = "15"
    title = "Latency and throughput by batch size"
    about = (
        "The same link for every batch size. The dashed lines are h2o's throughput here times the "
        "paper's smallest and largest speed-up over H2O."
    )

    def cases(self, setting: SpeedSetting) -> Cases:
        batches = setting.scale.batches
        return [({"batch": batch}, setting.sweep(batch=batch)) for batch in batches]

    def rows_of(self, result: Result) -> list[Row]:
        return systems(result)

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        latency, speed = canvas.panels(1, 2)[0]
        canvas.curves(latency, rows, "batch", "step_ms")
        canvas.curves(speed, rows, "batch", "tokens_per_s")
        batches, base = series(rows, "h2o", "batch", "tokens_per_s")
        for factor, dashes in zip(OVER_H2O, ((5, 2), (2, 2)), strict=True):
            label = f"the paper: {factor:.2f} x h2o"
            values = [factor * each for each in base]
            dashed = (0, dashes)
            speed.plot(batches, values, color=PAPER, linestyle=dashed, linewidth=1.3, label=label)
        for each, y in ((latency, "one decode step of the batch (ms)"), (speed, "tokens per s")):
            log_axes(each, "xy", places=[row["batch"] for row in rows])
            name_axes(each, "batch (rows)", y)
        canvas.legend(latency, speed)
