"""Figure 18: one block's time, split."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from infinigen_kv_lab.bench.run import IDEAL
from infinigen_kv_lab.figures.drawing import Canvas, marks, name_axes
from infinigen_kv_lab.figures.rows import Row
from infinigen_kv_lab.figures.speed.figure import Cases, SpeedFigure
from infinigen_kv_lab.figures.speed.latency import PAPER_BLOCK
from infinigen_kv_lab.figures.speed.setting import SpeedSetting
from infinigen_kv_lab.figures.styles import BLUE, ORANGE, RED, SKY
from infinigen_kv_lab.points import Result

POLICIES = (IDEAL, "stream", "stream-int4", "h2o", "infinigen-paper", "infinigen")
PARTS = {
    "transfer": ("waiting for the link", RED),
    "attention": ("attention", BLUE),
    "feed_forward": ("feed-forward and norms", SKY),
    "prediction": ("prediction and starting to move", ORANGE),
}
"""Of a block's time, with label and colour."""
NEAR = 3.0  # times ideal: what the right panel shows


class Split(SpeedFigure):
    name = "18"
    title = "One block's time in a decode step"
    about = (
        "The mean over all blocks and the middle half of the steps, by hooks at the borders of "
        "attention and block; the right panel is the left one, magnified. Unpacking a quantised "
        "cache counts where it happens, as attention. The dashed marks are the paper's ratios to "
        "ideal (its Figure 18, on a GPU) times the ideal measured here."
    )

    def cases(self, setting: SpeedSetting) -> Cases:
        policies = tuple(name for name in POLICIES if name in setting.policies)
        scale = setting.scale
        sizes = {"prompt_tokens": scale.prompt_tokens, "decode_tokens": scale.sweep_tokens}
        return [({}, setting.sweep(kind="blocks", policies=policies, **sizes))]

    def rows_of(self, result: Result) -> list[Row]:
        blocks = result["blocks"]
        base = blocks[IDEAL]["total"]
        return [
            {
                "system": name,
                **{f"{part}_ms": parts[part] for part in PARTS},
                "total_ms": parts["total"],
                "ratio_to_ideal": parts["total"] / base,
                "paper_ratio_to_ideal": PAPER_BLOCK.get(name),
            }
            for name, parts in blocks.items()
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        whole, near = canvas.panels(1, 2, height=1.8 + 0.42 * len(rows), sharey=True)[0]
        shown = list(reversed(rows))
        base = next(row["total_ms"] for row in rows if row["system"] == IDEAL)
        marked = [
            (row["paper_ratio_to_ideal"] * base, place)
            for place, row in enumerate(shown)
            if row["paper_ratio_to_ideal"]
        ]
        limits = {
            whole: 1.2 * max([row["total_ms"] for row in rows] + [value for value, _ in marked]),
            near: NEAR * base,
        }
        for axes, limit in limits.items():
            left = np.zeros(len(rows))
            for part, (label, color) in PARTS.items():
                widths = [row[f"{part}_ms"] for row in shown]
                axes.barh(range(len(rows)), widths, 0.62, left, color=color, label=label)
                left += widths
            inside = [(value, place) for value, place in marked if value < limit]
            marks(axes, inside, "the paper's ratio to ideal")
            axes.set_xlim(0, limit)
            axes.grid(visible=False, axis="y")
            name_axes(axes, "one block (ms)", "")
        words = [f"{row['system']}\n{row['ratio_to_ideal']:.2f} x ideal" for row in shown]
        whole.set_yticks(range(len(shown)), words)
        near.set_title(f"up to {NEAR:g} times ideal", fontsize=10, loc="left")
        canvas.legend(whole, columns=3)
