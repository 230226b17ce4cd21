"""Figure 16b: speed-up over streaming by model size."""

from __future__ import annotations

from collections.abc import Sequence

from infinigen_kv_lab.figures.drawing import Canvas, brief, name_axes
from infinigen_kv_lab.figures.rows import Row, names, rows_with
from infinigen_kv_lab.figures.speed.figure import Cases, SpeedFigure, systems
from infinigen_kv_lab.figures.speed.measurement import SpeedMeasurement
from infinigen_kv_lab.figures.speed.setting import SpeedSetting
from infinigen_kv_lab.points import Result

SHOWN = ("stream-int4", "h2o", "infinigen")
BAR = 0.26


class Sizes(SpeedFigure):
    name = "16b"
    title = "Speed-up over stream by model size"
    about = (
        "Without --models the sizes are the same model cut down to its first layers: what a step "
        "costs is real, what such a model writes is not. All sizes use the same link."
    )

    def cases(self, setting: SpeedSetting) -> Cases:
        if setting.models:
            named = {"": setting.model, **{name: name for name in setting.models}}
            return [
                ({"model": label, "layers_kept": None}, setting.sweep(model=name))
                for name, label in named.items()
            ]
        kept = {max(2, round(share * setting.layers)) for share in setting.scale.depths}
        return [_cut(setting, count) for count in sorted(kept)]

    def rows_of(self, result: Result) -> list[Row]:
        steps = {row["system"]: row["step_ms"] for row in systems(result)}
        return [
            {
                "parameters": result.get("parameters"),
                "system": name,
                "step_ms": steps[name],
                "speedup_over_stream": steps["stream"] / steps[name],
            }
            for name in ("stream", *SHOWN)
            if name in steps
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        axes = canvas.panels(height=4.2)[0][0]
        models = names(rows, "model")
        sizes = {row["model"]: row["parameters"] for row in rows}
        shown = [name for name in names(rows) if name != "stream"]
        for at, name in enumerate(shown):
            own = rows_with(rows, system=name)
            shift = (at - (len(shown) - 1) / 2) * BAR
            places = [models.index(row["model"]) + shift for row in own]
            values = [row["speedup_over_stream"] for row in own]
            color = canvas.style(name)["color"]
            bars = axes.bar(places, values, 0.92 * BAR, label=name, color=color)
            axes.bar_label(bars, [f"{brief(value)} x" for value in values], fontsize=8.5)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.margins(y=0.1)
        axes.set_xticks(range(len(models)), [_two_lines(name, sizes[name]) for name in models])
        axes.grid(visible=False, axis="x")
        name_axes(axes, "model", "speed-up over stream (times)")
        canvas.legend(axes)


def _cut(setting: SpeedSetting, layers: int) -> tuple[Row, SpeedMeasurement]:
    """The main model's first layers; the whole one where it has no more."""
    if layers >= setting.layers:
        return {"model": setting.model, "layers_kept": None}, setting.sweep()
    label = f"{setting.model}, first {layers} of {setting.layers} layers"
    return {"model": label, "layers_kept": layers}, setting.sweep(layers=layers)


def _two_lines(name: str, parameters: int | None) -> str:
    model, _, cut = name.rpartition("/")[2].partition(", ")
    lines = [model if len(model) <= 28 else f"{model[:27]}…"]
    lines += [cut] if cut else []
    lines += [f"{parameters / 1e6:.3g} M parameters"] if parameters else []
    return "\n".join(lines)
