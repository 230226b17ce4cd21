"""Beyond the paper: packed homes crossed with policies."""

from __future__ import annotations

from collections.abc import Sequence

from infinigen_kv.storage.config import StorageConfig
from infinigen_kv.storage.homes.codec import CODECS
from infinigen_kv_lab.evals.perplexity import Perplexity
from infinigen_kv_lab.figures.accuracy.evaluation import Points
from infinigen_kv_lab.figures.accuracy.figure import AccuracyFigure, Cases, results_of
from infinigen_kv_lab.figures.accuracy.setting import SHARE, TEXT, AccuracySetting
from infinigen_kv_lab.figures.drawing import Canvas, log_axes, name_axes
from infinigen_kv_lab.figures.rows import Row, spread
from infinigen_kv_lab.figures.styles import GREY

POLICIES = ("infinigen", "infinigen-paper", "h2o", "stream")
EXACT = 1e-7  # nats; below it a system is as good as the full cache
MARKERS = {"none": "o", "int8": "s", "int4": "D"}


class Codecs(AccuracyFigure):
    name = "codecs"
    title = "Packed homes crossed with policies: KL against bytes"
    about = (
        "Left, the most that home and device hold of the KV and of what the policy keeps beside "
        "it; right, the bytes that a decode step attends to, as they are packed at home. No layer "
        "is kept on the device whole. Markers are codecs. Stream without a codec is the full cache "
        "itself, and so has no KL to show. Vertical lines are intervals."
    )

    def cases(self, setting: AccuracySetting) -> Cases:
        return [
            (
                {"codec": codec},
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

    def rows_of(self, result: Points) -> list[Row]:
        return [
            {
                "system": name,
                "held_mb": (found.costs.home_bytes + found.costs.device_bytes) / 1e6,
                "home_mb": found.costs.home_bytes / 1e6,
                "device_mb": found.costs.device_bytes / 1e6,
                "step_mb": found.costs.fetched_bytes / 1e6,
                "fetched_share": found.fetched_share,
                **spread("kl", found.kl),
                **spread("ratio", found.ratio),
                "windows": found.windows,
            }
            for name, found in results_of(result, Perplexity).items()
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        held, steps = canvas.panels(1, 2)[0]
        drawn = [row for row in rows if row["kl"] > EXACT]
        for axes, x in ((held, "held_mb"), (steps, "step_mb")):
            canvas.curves(axes, drawn, x, "kl", marker="")
            for row in drawn:
                color, marker = canvas.style(row["system"])["color"], MARKERS[row["codec"]]
                axes.plot(row[x], row["kl"], color=color, marker=marker, markersize=8)
            log_axes(axes, "xy", margin=0.08)
        for codec, marker in MARKERS.items():
            label = f"codec {codec}"
            held.plot([], [], color=GREY, marker=marker, linestyle="", label=label)
        name_axes(held, "held at home and on the device (MB)", "KL to the full cache (nats)")
        name_axes(steps, "attended to in a step (MB)", "KL to the full cache (nats)")
        canvas.legend(held, steps)
