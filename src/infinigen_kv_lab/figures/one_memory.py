"""Beyond the paper: everything in one memory, beside what a user would pick instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinigen_kv_lab.bench.peers import PEERS
from infinigen_kv_lab.bench.run import WARM_UP
from infinigen_kv_lab.figures.definition import Figure, Found, Row, Setting, names, series, systems
from infinigen_kv_lab.figures.guests import SPEED
from infinigen_kv_lab.figures.point import Point

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas


class OneMemory(Figure):
    name = "memory"
    title = "Decode speed by context, all KV in one memory"
    shows_peers = True
    about = (
        "No link: home and device are the same memory. ideal and infinigen are this engine, "
        "DynamicCache, StaticCache and QuantizedCache are Transformers' own on its own attention. "
        "Programs in files given with --peers were run apart."
    )

    def points(self, setting: Setting) -> list[Point]:
        return [
            setting.sweep(
                policies=("infinigen",),
                peers=PEERS,
                prompt_tokens=context,
                link="none",
                home="device",
            )
            for context in setting.scale.contexts
        ]

    def rows(self, setting: Setting, found: Found) -> list[Row]:
        rows = [
            {
                "context": point.prompt_tokens + WARM_UP,
                "system": row["system"],
                "tokens_per_s": row["tokens_per_s"],
                "step_ms": row["step_ms"],
                "source": "this run",
            }
            for point in self.points(setting)
            if point in found
            for row in systems(found[point])
        ]
        if rows:
            rows += [
                {
                    "context": point["context"],
                    "system": point["system"],
                    "tokens_per_s": point["tokens_per_s"],
                    "step_ms": 1e3 / point["tokens_per_s"] if point["tokens_per_s"] else None,
                    "source": guest.source,
                }
                for guest in setting.guests
                for point in guest.with_columns(SPEED)
            ]
        return rows

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        from infinigen_kv_lab.figures.drawing import name_axes, plain_log

        axes = canvas.panels(height=4.8)[0][0]
        for name in names(rows):
            canvas.line(axes, name, *series(rows, name, "context", "tokens_per_s"))
        axes.set_yscale("log")
        axes.margins(y=0.1)
        plain_log(axes.yaxis)
        name_axes(axes, "context (tokens)", "tokens per s, batch 1")
        canvas.legend(axes)
