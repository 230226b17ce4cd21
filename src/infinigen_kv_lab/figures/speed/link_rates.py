"""Beyond the paper: step time by the rate of the link, and from where on each policy pays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from infinigen_kv_lab.bench.run import IDEAL
from infinigen_kv_lab.figures.drawing import Canvas, log_axes, name_axes
from infinigen_kv_lab.figures.rows import Row, names, series
from infinigen_kv_lab.figures.speed.figure import Cases, Results, SpeedFigure, systems
from infinigen_kv_lab.figures.speed.setting import SpeedSetting
from infinigen_kv_lab.points import Result

POLICIES = ("stream", "stream-int4", "h2o", "quest", "infinigen-paper", "infinigen")
UNCOMPARED = ("stream", IDEAL)


class LinkRates(SpeedFigure):
    name = "link"
    title = "Step time by link rate, and the rate below which each policy pays"
    about = (
        "The link is EMULATED at every rate: bytes really move, and a transfer takes at least "
        "bytes / rate. A policy pays where its step is faster than that of stream; the break-even "
        "rate is interpolated between measured rates."
    )

    def cases(self, setting: SpeedSetting) -> Cases:
        shown = tuple(name for name in POLICIES if name in setting.policies)
        return [
            ({"rate_gb_per_s": rate}, setting.sweep(policies=shown, link=f"emulated:{rate:g}"))
            for rate in setting.scale.rates
        ]

    def rows(self, setting: SpeedSetting, results: Results) -> list[Row]:
        rows = super().rows(setting, results)
        for row in rows:
            row["pays_below_gb_per_s"] = break_even(rows, row["system"])
        return rows

    def rows_of(self, result: Result) -> list[Row]:
        shown = ("system", "step_ms", "link_wait_ms", "link_mb_per_step")
        return [{name: row[name] for name in shown} for row in systems(result)]

    def remarks(self, setting: SpeedSetting, rows: Sequence[Row]) -> list[str]:
        lowest = min(row["rate_gb_per_s"] for row in rows)
        said = []
        for name in names(rows):
            if name in UNCOMPARED:
                continue
            rate = break_even(rows, name)
            if rate is None:
                where = f"at no rate from {lowest:g} GB/s on"
            elif math.isinf(rate):
                where = "at every measured rate"
            else:
                where = f"below {rate:.2g} GB/s"
            said.append(f"{name} pays {where}.")
        return said

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        axes = canvas.panels(height=5.2)[0][0]
        rates = {name: break_even(rows, name) for name in names(rows)}
        labels = {
            name: (name if name in UNCOMPARED else name + _pays(rate), name)
            for name, rate in rates.items()
        }
        canvas.curves(axes, rows, "rate_gb_per_s", "step_ms", looks=labels)
        ring = {"marker": "o", "markersize": 13, "fillstyle": "none", "linestyle": ""}
        for name, rate in rates.items():
            if name not in UNCOMPARED and rate is not None and math.isfinite(rate):
                known, times = np.log(series(rows, name, "rate_gb_per_s", "step_ms"))
                step = math.exp(np.interp(math.log(rate), known, times))
                axes.plot([rate], [step], color=canvas.style(name)["color"], **ring)
        log_axes(axes, "xy", places=[row["rate_gb_per_s"] for row in rows])
        name_axes(axes, "rate of the EMULATED link (GB/s)", "one decode step of the batch (ms)")
        canvas.legend(axes, columns=2)


def break_even(rows: Sequence[Row], name: str) -> float | None:
    """Rate below which a system is faster than ``stream``, in GB/s.

    None where it is not at the lowest measured rate, infinity where it is at all of them.
    """
    times = dict(zip(*series(rows, name, "rate_gb_per_s", "step_ms"), strict=True))
    streamed = dict(zip(*series(rows, "stream", "rate_gb_per_s", "step_ms"), strict=True))
    rates = sorted(times.keys() & streamed.keys())
    gains = [math.log(streamed[rate] / times[rate]) for rate in rates]
    if name == "stream" or not gains or gains[0] <= 0:
        return None
    end = next((place for place, gain in enumerate(gains) if gain <= 0), None)
    if end is None:
        return math.inf
    # between the last rate at which it pays and the next one, where the gain is none
    around = [end, end - 1]
    logs = [math.log(rates[place]) for place in around]
    return math.exp(np.interp(0.0, [gains[place] for place in around], logs))


def _pays(rate: float | None) -> str:
    if rate is None:
        return " (does not pay)"
    return " (pays everywhere)" if math.isinf(rate) else f" (pays below {rate:.2g} GB/s)"
