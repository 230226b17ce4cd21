"""Beyond the paper: everything in one memory, beside what a user would pick instead."""

from __future__ import annotations

from collections.abc import Sequence

from infinigen_kv_lab.bench.peers import PEERS
from infinigen_kv_lab.bench.run import WARM_UP
from infinigen_kv_lab.figures.drawing import Canvas, log_axes, name_axes
from infinigen_kv_lab.figures.rows import Row
from infinigen_kv_lab.figures.speed.figure import Cases, Results, SpeedFigure, systems
from infinigen_kv_lab.figures.speed.peer_results import SPEED
from infinigen_kv_lab.figures.speed.setting import SpeedSetting
from infinigen_kv_lab.points import Result


class OneMemory(SpeedFigure):
    name = "memory"
    title = "Decode speed by context, all KV in one memory"
    shows_peers = True
    about = (
        "No link: home and device are the same memory. ideal and infinigen are this engine, "
        "DynamicCache, StaticCache and QuantizedCache are Transformers' own on its own attention. "
        "Programs in files given with --peers were run apart."
    )

    def cases(self, setting: SpeedSetting) -> Cases:
        own = {"policies": ("infinigen",), "peers": PEERS, "link": "none", "home": "device"}
        return [
            ({"context": context + WARM_UP}, setting.sweep(prompt_tokens=context, **own))
            for context in setting.scale.contexts
        ]

    def rows(self, setting: SpeedSetting, results: Results) -> list[Row]:
        rows = super().rows(setting, results)
        others = [
            {
                "context": point["context"],
                "system": point["system"],
                "tokens_per_s": point["tokens_per_s"],
                "step_ms": 1e3 / point["tokens_per_s"] if point["tokens_per_s"] else None,
                "source": program.source,
            }
            for program in setting.peer_results
            for point in program.with_columns(SPEED)
        ]
        return rows + others if rows else []

    def rows_of(self, result: Result) -> list[Row]:
        shown = ("system", "tokens_per_s", "step_ms")
        return [
            {**{name: row[name] for name in shown}, "source": "this run"} for row in systems(result)
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        axes = canvas.panels(height=4.8)[0][0]
        canvas.curves(axes, rows, "context", "tokens_per_s")
        log_axes(axes, "y", margin=0.1)
        name_axes(axes, "context (tokens)", "tokens per s, batch 1")
        canvas.legend(axes)
