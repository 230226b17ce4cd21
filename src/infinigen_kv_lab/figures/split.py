"""Figure 18: one block's time, split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from infinigen_kv_lab.bench.run import IDEAL
from infinigen_kv_lab.figures.definition import Figure, Found, Row, Setting
from infinigen_kv_lab.figures.latency import PAPER_BLOCK
from infinigen_kv_lab.figures.point import Point

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

POLICIES = (IDEAL, "stream", "stream-int4", "h2o", "infinigen-paper", "infinigen")
WORDS = {
    "transfer": "waiting for the link",
    "attention": "attention",
    "feed_forward": "feed-forward and norms",
    "prediction": "prediction and starting to move",
}
NEAR = 3.0  # times ideal: what the right panel shows


class Split(Figure):
    name = "18"
    title = "One block's time in a decode step"
    about = (
        "The mean over all blocks and the middle half of the steps, by hooks at the borders of "
        "attention and block; the right panel is the left one, magnified. Unpacking a quantised "
        "cache counts where it happens, as attention. The dashed marks are the paper's ratios to "
        "ideal (its Figure 18, on a GPU) times the ideal measured here."
    )

    def points(self, setting: Setting) -> list[Point]:
        scale = setting.scale
        return [
            setting.sweep(
                kind="blocks",
                policies=tuple(name for name in POLICIES if name in setting.policies),
                prompt_tokens=scale.prompt_tokens,
                decode_tokens=scale.sweep_tokens,
            )
        ]

    def rows(self, setting: Setting, found: Found) -> list[Row]:
        (point,) = self.points(setting)
        if point not in found:
            return []
        blocks = found[point]["blocks"]
        base = blocks[IDEAL]["total"]
        return [
            {
                "system": name,
                **{f"{part}_ms": parts[part] for part in WORDS},
                "total_ms": parts["total"],
                "ratio_to_ideal": parts["total"] / base,
                "paper_ratio_to_ideal": PAPER_BLOCK.get(name),
            }
            for name, parts in blocks.items()
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        from infinigen_kv_lab.figures.drawing import PARTS, marks, name_axes

        axes = canvas.panels(1, 2, height=1.8 + 0.42 * len(rows), sharey=True)
        whole, near = axes[0]
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
        for each, limit in limits.items():
            self._bars(each, shown, PARTS)
            shown_here = [(value, place) for value, place in marked if value < limit]
            marks(each, shown_here, "the paper's ratio to ideal")
            each.set_xlim(0, limit)
            each.grid(visible=False, axis="y")
            name_axes(each, "one block (ms)", "")
        words = [f"{row['system']}\n{row['ratio_to_ideal']:.2f} x ideal" for row in shown]
        whole.set_yticks(range(len(shown)), words)
        near.set_title(f"up to {NEAR:g} times ideal", fontsize=10, loc="left")
        canvas.legend(whole, columns=3)

    @staticmethod
    def _bars(axes: Any, rows: Sequence[Row], colors: Any) -> None:
        left = [0.0] * len(rows)
        for part, words in WORDS.items():
            widths = [row[f"{part}_ms"] for row in rows]
            axes.barh(range(len(rows)), widths, 0.62, left, color=colors[part], label=words)
            left = [start + width for start, width in zip(left, widths, strict=True)]
