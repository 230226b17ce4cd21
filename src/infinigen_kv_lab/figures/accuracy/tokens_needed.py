"""Figure 5: how many tokens the attention needs, by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinigen_kv_lab.evals.reading import FULL
from infinigen_kv_lab.evals.sparsity import MASS, Sparsity
from infinigen_kv_lab.figures.accuracy.definition import (
    AccuracyFigure,
    AccuracySetting,
    Found,
    results_of,
)
from infinigen_kv_lab.figures.accuracy.looks import look_at_contexts
from infinigen_kv_lab.figures.accuracy.trial import Trial
from infinigen_kv_lab.figures.definition import Row

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

LONGEST = 2048  # tokens of context at most, as in the paper
LATE = 0.6  # of the layers: where the later one of the two is taken


class TokensNeeded(AccuracyFigure):
    name = "5"
    title = f"Tokens that make up {MASS} of a query's attention"
    intervals = False
    about = (
        "The mean over heads and queries by layer, and how the queries of an early and of a later "
        "layer spread, which is what the paper shows: some layers attend to many tokens, so one "
        "budget for all of them fits none."
    )

    def trials(self, setting: AccuracySetting) -> list[Trial]:
        return [look_at_contexts(setting)]

    def rows(self, setting: AccuracySetting, found: Found) -> list[Row]:
        (trial,) = self.trials(setting)
        result = results_of(found, trial, Sparsity).get(FULL)
        if result is None:
            return []
        at_length = [each for each in result.lengths if each.length <= LONGEST] or result.lengths
        context = at_length[-1]
        return [
            {
                "layer": layer,
                "context": context.length,
                "tokens_needed": context.needed.values[at],
                "share_needed": context.needed_share.values[at],
                **{f"from_{2**low}": part for low, part in enumerate(context.histogram[at])},
            }
            for at, layer in enumerate(result.layers)
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        from infinigen_kv_lab.figures.drawing import name_axes

        by_layer, spreads = canvas.panels(1, 2)[0]
        layers = [row["layer"] for row in rows]
        needed = [row["tokens_needed"] for row in rows]
        canvas.line(by_layer, "infinigen", layers, needed, "mean of the layer")
        by_layer.set_ylim(bottom=0)
        by_layer.xaxis.get_major_locator().set_params(integer=True)
        chosen = [rows[0], rows[min(len(rows) - 1, round(LATE * len(rows)))]]
        bins = [int(name.removeprefix("from_")) for name in rows[0] if name.startswith("from_")]
        looks = (("h2o", -0.2), ("infinigen", 0.2))
        for row, (look, shift) in zip(chosen, looks, strict=True):
            heights = [100 * row[f"from_{low}"] for low in bins]
            places = [at + shift for at in range(len(bins))]
            color = canvas.style(look)["color"]
            spreads.bar(places, heights, width=0.4, color=color, label=f"layer {row['layer']}")
        spreads.set_xticks(range(len(bins)), [f"{low:d}" for low in bins], rotation=45)
        context = rows[0]["context"]
        name_axes(by_layer, "layer", f"tokens for {MASS} of the attention (of {context})")
        name_axes(spreads, "tokens needed, from ... on", "queries of the layer (%)")
        canvas.legend(by_layer, spreads)
