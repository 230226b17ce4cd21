"""Beyond the paper: what a resident set on the device buys, by its size."""

from __future__ import annotations

from collections.abc import Sequence

from infinigen_kv_lab.bench.run import IDEAL
from infinigen_kv_lab.figures.drawing import Canvas, log_axes, name_axes
from infinigen_kv_lab.figures.rows import Row
from infinigen_kv_lab.figures.speed.figure import Cases, SpeedFigure, one_system
from infinigen_kv_lab.figures.speed.setting import SpeedSetting
from infinigen_kv_lab.points import Result


class ResidentSets(SpeedFigure):
    name = "resident"
    title = "Hit rate, link bytes and step time of infinigen by resident set"
    about = (
        "The resident set is what stays on the device of the entries that earlier steps fetched, "
        "as a share of the context. The paper has none, so it stands at 0 % here."
    )

    def cases(self, setting: SpeedSetting) -> Cases:
        scale = setting.scale
        own = {
            "policies": ("infinigen",),
            "prompt_tokens": scale.prompt_tokens,
            "decode_tokens": max(scale.sweep_tokens, scale.decode_tokens // 2),
        }
        return [
            ({"resident_share": share}, setting.sweep(resident=share, **own))
            for share in scale.residents
        ]

    def rows_of(self, result: Result) -> list[Row]:
        row, base = one_system(result, "infinigen"), one_system(result, IDEAL)
        assert row is not None and base is not None
        return [
            {
                "hit_rate": row["resident_hit_rate"],
                "link_mb_per_step": row["link_mb_per_step"],
                "step_ms": row["step_ms"],
                "ideal_step_ms": base["step_ms"],
                "link_wait_ms": row["link_wait_ms"],
                "kl_to_ideal": row["kl_to_ideal"],
            }
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        hits, moved, step = canvas.panels(3, 1, height=6.6, sharex=True)[:, 0]
        x = [100 * row["resident_share"] for row in rows]
        rates = [100 * (row["hit_rate"] or 0.0) for row in rows]
        canvas.line(hits, "infinigen", x, rates)
        canvas.line(moved, "infinigen", x, [row["link_mb_per_step"] for row in rows])
        canvas.line(step, "infinigen", x, [row["step_ms"] for row in rows])
        canvas.line(step, IDEAL, x, [row["ideal_step_ms"] for row in rows])
        hits.set_ylim(0, 105)
        log_axes(moved, "y", margin=0.15)
        step.set_ylim(0, 1.15 * max(row["step_ms"] for row in rows))
        name_axes(hits, "", "found resident (%)")
        name_axes(moved, "", "link (MB per step)")
        name_axes(step, "resident set (% of the context)", "one step (ms)")
        canvas.legend(step)
