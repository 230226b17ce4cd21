"""Figure 16a: speed-up over streaming, and tokens fetched, by sequence length."""

from __future__ import annotations

from collections.abc import Sequence

from infinigen_kv_lab.bench.run import RECORDED, WARM_UP
from infinigen_kv_lab.figures.drawing import Canvas, level, log_axes, name_axes
from infinigen_kv_lab.figures.rows import Row, rows_with, series
from infinigen_kv_lab.figures.speed.figure import Cases, SpeedFigure, systems
from infinigen_kv_lab.figures.speed.setting import COMPARED, SpeedSetting
from infinigen_kv_lab.figures.styles import PAPER
from infinigen_kv_lab.points import Result

PAPER_TOKENS = {512: 37, 1024: 60, 1536: 66, 2048: 73}
PAPER_SPEEDUP = 5.28  # over FlexGen at 2048 tokens


class Lengths(SpeedFigure):
    name = "16a"
    title = "Speed-up over stream, and tokens fetched, by sequence length"
    about = (
        "Tokens fetched are those that a layer which selects attends to, the mean over steps, "
        "heads and layers; the recent window and the sinks count, as does what was on the device "
        "already. The paper's numbers are for a model of its own, on a GPU."
    )

    def cases(self, setting: SpeedSetting) -> Cases:
        scale = setting.scale
        return [
            # the headline measurement has the same systems, and more
            (
                {"prompt_tokens": length},
                setting.headline()
                if length == scale.prompt_tokens
                else setting.sweep(prompt_tokens=length),
            )
            for length in scale.lengths
        ]

    def rows_of(self, result: Result) -> list[Row]:
        measured = systems(result)
        slow = next((row["step_ms"] for row in measured if row["system"] == "stream"), None)
        # the recorded steps come after the measured ones
        cached = result["prompt_tokens"] + WARM_UP + result["decode_tokens"] + (RECORDED - 1) / 2
        return [
            {
                "system": row["system"],
                "step_ms": row["step_ms"],
                "speedup_over_stream": slow and slow / row["step_ms"],
                "tokens_fetched": cached * row["fetched_share"],
                "tokens_cached": cached,
                "paper_tokens_fetched": PAPER_TOKENS.get(result["prompt_tokens"]),
            }
            for row in measured
            if row["system"] in COMPARED
        ]

    def remarks(self, setting: SpeedSetting, rows: Sequence[Row]) -> list[str]:
        lengths, fetched = series(rows, "infinigen", "prompt_tokens", "tokens_fetched")
        if len(lengths) < 2:
            return []
        return [
            f"From {lengths[0]:.0f} to {lengths[-1]:.0f} tokens the context grows "
            f"{lengths[-1] / lengths[0]:.1f} times, what is fetched {fetched[-1] / fetched[0]:.1f} "
            "times (the paper: 2.0 times for 4 times)."
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        speed, fetched = canvas.panels(1, 2)[0]
        others = [row for row in rows if row["system"] != "stream"]
        canvas.curves(speed, others, "prompt_tokens", "speedup_over_stream")
        ours = rows_with(rows, system="infinigen")
        canvas.curves(fetched, ours, "prompt_tokens", "tokens_fetched")
        fetched.plot(
            PAPER_TOKENS.keys(),
            PAPER_TOKENS.values(),
            color=PAPER,
            linestyle=(0, (4, 2)),
            marker="x",
            label="the paper's InfiniGen",
        )
        level(speed, PAPER_SPEEDUP, f"the paper: {PAPER_SPEEDUP} x at 2048")
        lengths = [row["prompt_tokens"] for row in rows]
        speed.margins(y=0.12)
        log_axes(speed, "xy", places=lengths)
        log_axes(fetched, "x", places=lengths)
        fetched.set_ylim(bottom=0)
        name_axes(speed, "prompt (tokens)", "speed-up over stream (times)")
        name_axes(fetched, "prompt (tokens)", "fetched per layer, head and step (tokens)")
        canvas.legend(speed, fetched)
