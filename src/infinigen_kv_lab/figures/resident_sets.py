"""Beyond the paper: what a resident set on the device buys, by its size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinigen_kv_lab.bench.run import IDEAL
from infinigen_kv_lab.figures.definition import Figure, Found, Row, Setting, one_system
from infinigen_kv_lab.figures.point import Point

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas


class ResidentSets(Figure):
    name = "resident"
    title = "Hit rate, link bytes and step time of infinigen by resident set"
    about = (
        "The resident set is what stays on the device of the entries that earlier steps fetched, "
        "as a share of the context. The paper has none, so it stands at 0 % here."
    )

    def points(self, setting: Setting) -> list[Point]:
        scale = setting.scale
        return [
            setting.sweep(
                policies=("infinigen",),
                resident=share,
                prompt_tokens=scale.prompt_tokens,
                decode_tokens=max(scale.sweep_tokens, scale.decode_tokens // 2),
            )
            for share in scale.residents
        ]

    def rows(self, setting: Setting, found: Found) -> list[Row]:
        rows = []
        for point in self.points(setting):
            row = one_system(found[point], "infinigen") if point in found else None
            base = one_system(found[point], IDEAL) if point in found else None
            if row is not None and base is not None:
                rows.append(
                    {
                        "resident_share": point.resident,
                        "hit_rate": row["resident_hit_rate"],
                        "link_mb_per_step": row["link_mb_per_step"],
                        "step_ms": row["step_ms"],
                        "ideal_step_ms": base["step_ms"],
                        "link_wait_ms": row["link_wait_ms"],
                        "kl_to_ideal": row["kl_to_ideal"],
                    }
                )
        return rows

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        from infinigen_kv_lab.figures.drawing import name_axes, plain_log

        axes = canvas.panels(3, 1, height=6.6, sharex=True)
        hits, moved, step = (each[0] for each in axes)
        x = [100 * row["resident_share"] for row in rows]
        rates = [100 * (row["hit_rate"] or 0.0) for row in rows]
        canvas.line(hits, "infinigen", x, rates)
        canvas.line(moved, "infinigen", x, [row["link_mb_per_step"] for row in rows])
        canvas.line(step, "infinigen", x, [row["step_ms"] for row in rows])
        canvas.line(step, IDEAL, x, [row["ideal_step_ms"] for row in rows])
        hits.set_ylim(0, 105)
        moved.set_yscale("log")
        moved.margins(y=0.15)
        plain_log(moved.yaxis)
        step.set_ylim(0, 1.15 * max(row["step_ms"] for row in rows))
        name_axes(hits, "", "found resident (%)")
        name_axes(moved, "", "link (MB per step)")
        name_axes(step, "resident set (% of the context)", "one step (ms)")
        canvas.legend(step)
