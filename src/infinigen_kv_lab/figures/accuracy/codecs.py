"""Beyond the paper: packed homes crossed with policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from infinigen_kv.storage.config import StorageConfig
from infinigen_kv.storage.homes.codec import CODECS
from infinigen_kv_lab.evals.perplexity import Perplexity
from infinigen_kv_lab.figures.accuracy.definition import (
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

TEXT = "wikitext2"
POLICIES = ("infinigen", "infinigen-paper", "h2o", "stream")
EXACT = 1e-7  # nats; below it a system is as good as the full cache
MARKERS: Mapping[str, str] = MappingProxyType({"none": "o", "int8": "s", "int4": "D"})


class Codecs(AccuracyFigure):
    name = "codecs"
    title = "Packed homes crossed with policies: KL against bytes"
    about = (
        "Left, the most that home and device hold of the KV and of what the policy keeps beside "
        "it; right, the bytes that a decode step attends to, as they are packed at home. No layer "
        "is kept on the device whole. Markers are codecs. Stream without a codec is the full cache "
        "itself, and so has no KL to show. Vertical lines are intervals."
    )

    def trials(self, setting: AccuracySetting) -> list[Trial]:
        return [trial for _, trial in self._made(setting)]

    @staticmethod
    def _made(setting: AccuracySetting) -> list[tuple[str, Trial]]:
        return [
            (
                codec,
                setting.reading(
                    TEXT,
                    POLICIES,
                    setting.scale.stepwise,
                    storage=StorageConfig(codec=codec, resident_layers=()),
                    budget=SHARE,
                ),
            )
            for codec in CODECS
        ]

    def rows(self, setting: AccuracySetting, found: Found) -> list[Row]:
        rows: list[Row] = []
        for codec, trial in self._made(setting):
            for name, result in results_of(found, trial, Perplexity).items():
                costs = result.costs
                rows.append(
                    {
                        "system": name,
                        "codec": codec,
                        "held_mb": (costs.home_bytes + costs.device_bytes) / 1e6,
                        "home_mb": costs.home_bytes / 1e6,
                        "device_mb": costs.device_bytes / 1e6,
                        "step_mb": costs.fetched_bytes / 1e6,
                        "fetched_share": result.fetched_share,
                        **spread("kl", result.kl),
                        **spread("ratio", result.ratio),
                        "windows": result.windows,
                    }
                )
        return rows

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        from infinigen_kv_lab.figures.accuracy.drawing import curve
        from infinigen_kv_lab.figures.drawing import name_axes, plain_log

        held, steps = canvas.panels(1, 2)[0]
        drawn = [row for row in rows if row["kl"] > EXACT]
        for axes, x in ((held, "held_mb"), (steps, "step_mb")):
            for name in names(drawn):
                mine = [row for row in drawn if row["system"] == name]
                curve(canvas, axes, mine, x, "kl", look=name)
                color = canvas.style(name)["color"]
                for row in mine:
                    axes.plot(
                        row[x], row["kl"], color=color, marker=MARKERS[row["codec"]], markersize=8
                    )
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.margins(0.08)
            plain_log(axes.xaxis)
            plain_log(axes.yaxis)
        for codec, marker in MARKERS.items():
            label = f"codec {codec}"
            held.plot([], [], color="#777777", marker=marker, linestyle="", label=label)
        name_axes(held, "held at home and on the device (MB)", "KL to the full cache (nats)")
        name_axes(steps, "attended to in a step (MB)", "KL to the full cache (nats)")
        canvas.legend(held, steps)
