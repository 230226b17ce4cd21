"""Table 1: how much a layer's input resembles what the layer before it had."""

from __future__ import annotations

from collections.abc import Sequence

from infinigen_kv_lab.evals.reading import FULL
from infinigen_kv_lab.evals.similarity import TENSORS, Similarity
from infinigen_kv_lab.figures.accuracy.evaluation import Points
from infinigen_kv_lab.figures.accuracy.figure import AccuracyFigure, Cases, results_of
from infinigen_kv_lab.figures.accuracy.setting import AccuracySetting
from infinigen_kv_lab.figures.drawing import Canvas, name_axes, whole_numbers
from infinigen_kv_lab.figures.rows import Row, interval, spread

SHOWN = {
    "block_input": ("input of the block", "infinigen"),
    "attention_input": ("input of the attention, after its norm", "infinigen-paper"),
    "attention_output": ("output of the attention", "h2o"),
    "feed_forward_output": ("output of the feed-forward", "streaming-llm"),
}
"""By tensor: its label, and the system whose look its line has."""


class SimilarityTable(AccuracyFigure):
    name = "table-1"
    title = "A layer's input beside what the layer before it had"
    intervals = False
    about = (
        "Mean cosine similarity, over tokens, of the input of a block with the input, the "
        "attention's output and the feed-forward's output of the block before. The input of the "
        "attention, after its norm, is compared with that of the attention before: this is what a "
        "rehearsal reads."
    )

    def cases(self, setting: AccuracySetting) -> Cases:
        return [({}, setting.look("similarity"))]

    def rows_of(self, result: Points) -> list[Row]:
        found = results_of(result, Similarity)[FULL]
        means: Row = {}
        for name in TENSORS:
            means |= spread(f"mean_{name}", getattr(found, name).mean)
        return [
            {"layer": layer, **{name: getattr(found, name).values[at] for name in TENSORS}} | means
            for at, layer in enumerate(found.layers)
        ]

    def remarks(self, setting: AccuracySetting, rows: Sequence[Row]) -> list[str]:
        first = rows[0]
        means = [
            f"{label} {first[f'mean_{name}']:.3f}{interval(first, f'mean_{name}')}"
            for name, (label, _) in SHOWN.items()
        ]
        return [f"Means over layers: {', '.join(means)}."]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        axes = canvas.panels()[0][0]
        for name, (label, look) in SHOWN.items():
            canvas.curve(axes, rows, "layer", name, look=look, label=label)
        axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.02)
        whole_numbers(axes)
        name_axes(axes, "layer", "cosine similarity with the layer before")
        canvas.legend(axes, columns=2)
