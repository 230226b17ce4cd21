"""Figure 16a: speed-up over streaming, and tokens fetched, by sequence length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from infinigen_kv_lab.bench.run import RECORDED, WARM_UP
from infinigen_kv_lab.figures.definition import Figure, Found, Row, Setting, names, series, systems
from infinigen_kv_lab.figures.point import Point

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

PAPER_TOKENS: Mapping[int, int] = MappingProxyType({512: 37, 1024: 60, 1536: 66, 2048: 73})
PAPER_SPEEDUP = 5.28  # over FlexGen at 2048 tokens


class Lengths(Figure):
    name = "16a"
    title = "Speed-up over stream, and tokens fetched, by sequence length"
    about = (
        "Tokens fetched are those that a layer which selects attends to, the mean over steps, "
        "heads and layers; the recent window and the sinks count, as does what was on the device "
        "already. The paper's numbers are for a model of its own, on a GPU."
    )

    def points(self, setting: Setting) -> list[Point]:
        scale = setting.scale
        made = [setting.sweep(prompt_tokens=length) for length in scale.lengths]
        # the headline point has the same systems, and more
        return [setting.base() if p.prompt_tokens == scale.prompt_tokens else p for p in made]

    def rows(self, setting: Setting, found: Found) -> list[Row]:
        rows: list[Row] = []
        shown = set(setting.sweep().policies)
        for point in self.points(setting):
            if point not in found:
                continue
            measured = systems(found[point])
            slow = next((row["step_ms"] for row in measured if row["system"] == "stream"), None)
            # the recorded steps come after the measured ones
            cached = point.prompt_tokens + WARM_UP + point.decode_tokens + (RECORDED - 1) / 2
            rows += [
                {
                    "prompt_tokens": point.prompt_tokens,
                    "system": row["system"],
                    "step_ms": row["step_ms"],
                    "speedup_over_stream": slow and slow / row["step_ms"],
                    "tokens_fetched": cached * row["fetched_share"],
                    "tokens_cached": cached,
                    "paper_tokens_fetched": PAPER_TOKENS.get(point.prompt_tokens),
                }
                for row in measured
                if row["system"] in shown
            ]
        return rows

    def remarks(self, setting: Setting, rows: Sequence[Row]) -> list[str]:
        lengths, fetched = series(rows, "infinigen", "prompt_tokens", "tokens_fetched")
        if len(lengths) < 2:
            return []
        return [
            f"From {lengths[0]:.0f} to {lengths[-1]:.0f} tokens the context grows "
            f"{lengths[-1] / lengths[0]:.1f} times, what is fetched {fetched[-1] / fetched[0]:.1f} "
            "times (the paper: 2.0 times for 4 times)."
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        from infinigen_kv_lab.figures.drawing import PAPER, level, log_ticks, name_axes, plain_log

        axes = canvas.panels(1, 2)
        speed, fetched = axes[0]
        lengths = [row["prompt_tokens"] for row in rows]
        for name in names(rows):
            if name != "stream":
                canvas.line(
                    speed, name, *series(rows, name, "prompt_tokens", "speedup_over_stream")
                )
        canvas.line(
            fetched, "infinigen", *series(rows, "infinigen", "prompt_tokens", "tokens_fetched")
        )
        fetched.plot(
            PAPER_TOKENS.keys(),
            PAPER_TOKENS.values(),
            color=PAPER,
            linestyle=(0, (4, 2)),
            marker="x",
            label="the paper's InfiniGen",
        )
        for each in (speed, fetched):
            each.set_xscale("log")
            log_ticks(each.xaxis, lengths)
        speed.set_yscale("log")
        speed.margins(y=0.12)
        fetched.set_ylim(bottom=0)
        level(speed, PAPER_SPEEDUP, f"the paper: {PAPER_SPEEDUP} x at 2048")
        plain_log(speed.yaxis)
        name_axes(speed, "prompt (tokens)", "speed-up over stream (times)")
        name_axes(fetched, "prompt (tokens)", "fetched per layer, head and step (tokens)")
        canvas.legend(speed, fetched)
