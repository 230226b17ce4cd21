"""Beyond the paper: step time by the rate of the link, and from where on each policy pays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinigen_kv_lab.bench.run import IDEAL
from infinigen_kv_lab.figures.definition import Figure, Found, Row, Setting, names, series, systems
from infinigen_kv_lab.figures.point import Point

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

POLICIES = ("stream", "stream-int4", "h2o", "quest", "infinigen-paper", "infinigen")


class LinkRates(Figure):
    name = "link"
    title = "Step time by link rate, and the rate below which each policy pays"
    about = (
        "The link is EMULATED at every rate: bytes really move, and a transfer takes at least "
        "bytes / rate. A policy pays where its step is faster than that of stream; the break-even "
        "rate is interpolated between measured rates."
    )

    def points(self, setting: Setting) -> list[Point]:
        shown = tuple(name for name in POLICIES if name in setting.policies)
        return [
            setting.sweep(policies=shown, link=f"emulated:{rate:g}") for rate in setting.scale.rates
        ]

    def rows(self, setting: Setting, found: Found) -> list[Row]:
        rows = [
            {
                "rate_gb_per_s": rate,
                "system": row["system"],
                "step_ms": row["step_ms"],
                "link_wait_ms": row["link_wait_ms"],
                "link_mb_per_step": row["link_mb_per_step"],
            }
            for rate, point in zip(setting.scale.rates, self.points(setting), strict=True)
            if point in found
            for row in systems(found[point])
        ]
        for row in rows:
            row["pays_below_gb_per_s"] = break_even(rows, row["system"])
        return rows

    def remarks(self, setting: Setting, rows: Sequence[Row]) -> list[str]:
        lowest = min(row["rate_gb_per_s"] for row in rows)
        said = []
        for name in names(rows):
            if name in ("stream", IDEAL):
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
        from infinigen_kv_lab.figures.drawing import log_ticks, name_axes, plain_log

        axes = canvas.panels(height=5.2)[0][0]
        for name in names(rows):
            rate = break_even(rows, name)
            label = name
            compared = name not in ("stream", IDEAL)
            if compared:
                label += _pays(rate)
            canvas.line(axes, name, *series(rows, name, "rate_gb_per_s", "step_ms"), label)
            if compared and rate is not None and math.isfinite(rate):
                ring = {"marker": "o", "markersize": 13, "fillstyle": "none", "linestyle": ""}
                color = canvas.style(name)["color"]
                axes.plot([rate], [_at(rows, name, rate)], color=color, **ring)
        axes.set_xscale("log")
        axes.set_yscale("log")
        log_ticks(axes.xaxis, [row["rate_gb_per_s"] for row in rows])
        plain_log(axes.yaxis)
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
    for place in range(1, len(rates)):
        if gains[place] <= 0:
            low, high = math.log(rates[place - 1]), math.log(rates[place])
            share = gains[place - 1] / (gains[place - 1] - gains[place])
            return math.exp(low + share * (high - low))
    return math.inf


def _pays(rate: float | None) -> str:
    if rate is None:
        return " (does not pay)"
    return " (pays everywhere)" if math.isinf(rate) else f" (pays below {rate:.2g} GB/s)"


def _at(rows: Sequence[Row], name: str, rate: float) -> float:
    """A system's step at a rate, interpolated on both logarithmic axes."""
    rates, times = series(rows, name, "rate_gb_per_s", "step_ms")
    for (low, before), (high, after) in zip(
        zip(rates, times, strict=True), zip(rates[1:], times[1:], strict=True), strict=False
    ):
        if low <= rate <= high:
            share = math.log(rate / low) / math.log(high / low)
            return float(before ** (1 - share) * after**share)
    return times[-1]
