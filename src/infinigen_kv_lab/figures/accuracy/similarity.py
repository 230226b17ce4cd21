"""Table 1: how much a layer's input resembles what the layer before it had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from infinigen_kv_lab.evals.reading import FULL
from infinigen_kv_lab.evals.similarity import TENSORS, Similarity
from infinigen_kv_lab.figures.accuracy.definition import (
    AccuracyFigure,
    AccuracySetting,
    Found,
    interval,
    results_of,
    spread,
)
from infinigen_kv_lab.figures.accuracy.looks import look
from infinigen_kv_lab.figures.accuracy.trial import Trial
from infinigen_kv_lab.figures.definition import Row

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

SHOWN: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "block_input": ("input of the block", "infinigen"),
        "attention_input": ("input of the attention, after its norm", "infinigen-paper"),
        "attention_output": ("output of the attention", "h2o"),
        "feed_forward_output": ("output of the feed-forward", "streaming-llm"),
    }
)
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

    def trials(self, setting: AccuracySetting) -> list[Trial]:
        return [look(setting, "similarity")]

    def rows(self, setting: AccuracySetting, found: Found) -> list[Row]:
        (trial,) = self.trials(setting)
        result = results_of(found, trial, Similarity).get(FULL)
        if result is None:
            return []
        means: Row = {}
        for name in TENSORS:
            means |= spread(f"mean_{name}", getattr(result, name).mean)
        return [
            {"layer": layer, **{name: getattr(result, name).values[at] for name in TENSORS}} | means
            for at, layer in enumerate(result.layers)
        ]

    def remarks(self, setting: AccuracySetting, rows: Sequence[Row]) -> list[str]:
        first = rows[0]
        means = [
            f"{label} {first[f'mean_{name}']:.3f}{interval(first, f'mean_{name}')}"
            for name, (label, _) in SHOWN.items()
        ]
        return [f"Means over layers: {', '.join(means)}."]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        from infinigen_kv_lab.figures.drawing import name_axes

        axes = canvas.panels()[0][0]
        layers = [row["layer"] for row in rows]
        for name, (label, system) in SHOWN.items():
            canvas.line(axes, system, layers, [row[name] for row in rows], label)
        axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.02)
        axes.xaxis.get_major_locator().set_params(integer=True)
        name_axes(axes, "layer", "cosine similarity with the layer before")
        canvas.legend(axes, columns=2)
