"""Figure 16b: speed-up over streaming by model size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinigen_kv_lab.figures.definition import Figure, Found, Row, Setting, names, systems
from infinigen_kv_lab.figures.point import Point

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

SHOWN = ("stream-int4", "h2o", "infinigen")
BAR = 0.26


class Sizes(Figure):
    name = "16b"
    title = "Speed-up over stream by model size"
    about = (
        "Without --models the sizes are the same model cut down to its first layers: what a step "
        "costs is real, what such a model writes is not. All sizes use the same link."
    )

    def points(self, setting: Setting) -> list[Point]:
        if setting.models:
            return [setting.sweep(), *(setting.sweep(model=name) for name in setting.models)]
        kept = {max(2, round(share * setting.layers)) for share in setting.scale.depths}
        return [
            setting.sweep(layers=None if count >= setting.layers else count)
            for count in sorted(kept)
        ]

    def rows(self, setting: Setting, found: Found) -> list[Row]:
        rows: list[Row] = []
        for point in self.points(setting):
            if point not in found:
                continue
            steps = {row["system"]: row["step_ms"] for row in systems(found[point])}
            rows += [
                {
                    "model": _label(setting, point),
                    "layers_kept": point.layers,
                    "parameters": found[point].get("parameters"),
                    "system": name,
                    "step_ms": steps[name],
                    "speedup_over_stream": steps["stream"] / steps[name],
                }
                for name in ("stream", *SHOWN)
                if name in steps
            ]
        return rows

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        from infinigen_kv_lab.figures.drawing import brief, name_axes

        axes = canvas.panels(height=4.2)[0][0]
        models = list(dict.fromkeys(row["model"] for row in rows))
        sizes = {row["model"]: row["parameters"] for row in rows}
        shown = [name for name in names(rows) if name != "stream"]
        for at, name in enumerate(shown):
            own = {
                row["model"]: row["speedup_over_stream"] for row in rows if row["system"] == name
            }
            places = [models.index(model) + (at - (len(shown) - 1) / 2) * BAR for model in own]
            bars = axes.bar(
                places, own.values(), 0.92 * BAR, label=name, color=canvas.style(name)["color"]
            )
            axes.bar_label(bars, [f"{brief(each)} x" for each in own.values()], fontsize=8.5)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.margins(y=0.1)
        axes.set_xticks(range(len(models)), [_two_lines(name, sizes[name]) for name in models])
        axes.grid(visible=False, axis="x")
        name_axes(axes, "model", "speed-up over stream (times)")
        canvas.legend(axes)


def _label(setting: Setting, point: Point) -> str:
    if point.layers is not None:
        return f"{setting.model}, first {point.layers} of {setting.layers} layers"
    return point.model or setting.model


def _two_lines(name: str, parameters: int | None) -> str:
    model, _, cut = name.rpartition("/")[2].partition(", ")
    lines = [model if len(model) <= 28 else f"{model[:27]}…"]
    lines += [cut] if cut else []
    lines += [f"{parameters / 1e6:.3g} M parameters"] if parameters else []
    return "\n".join(lines)
