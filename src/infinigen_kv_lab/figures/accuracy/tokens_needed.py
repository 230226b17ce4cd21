"""Figure 5: how many tokens the attention needs, by layer."""

from __future__ import annotations

from collections.abc import Sequence

from infinigen_kv_lab.evals.reading import FULL
from infinigen_kv_lab.evals.sparsity import MASS, Sparsity
from infinigen_kv_lab.figures.accuracy.evaluation import Points
from infinigen_kv_lab.figures.accuracy.figure import AccuracyFigure, Cases, results_of
from infinigen_kv_lab.figures.accuracy.setting import AccuracySetting
from infinigen_kv_lab.figures.drawing import Canvas, name_axes, whole_numbers
from infinigen_kv_lab.figures.rows import Row

LONGEST = 2048  # tokens of context at most, as in the paper
LATER_LAYER = 0.6  # of the layers: where the later one of the two is taken


class TokensNeeded(AccuracyFigure):
    name = "5"
    title = f"Tokens that make up {MASS} of a query's attention"
    intervals = False
    about = (
        "The mean over heads and queries by layer, and how the queries of an early and of a later "
        "layer spread, which is what the paper shows: some layers attend to many tokens, so one "
        "budget for all of them fits none."
    )

    def cases(self, setting: AccuracySetting) -> Cases:
        return [({}, setting.look_at_contexts())]

    def rows_of(self, result: Points) -> list[Row]:
        found = results_of(result, Sparsity)[FULL]
        at_length = [each for each in found.lengths if each.length <= LONGEST] or found.lengths
        context = at_length[-1]
        return [
            {
                "layer": layer,
                "context": context.length,
                "tokens_needed": context.needed.values[at],
                "share_needed": context.needed_share.values[at],
                **{f"from_{2**low}": part for low, part in enumerate(context.histogram[at])},
            }
            for at, layer in enumerate(found.layers)
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        by_layer, spreads = canvas.panels(1, 2)[0]
        label = "mean of the layer"
        canvas.curve(by_layer, rows, "layer", "tokens_needed", look="infinigen", label=label)
        by_layer.set_ylim(bottom=0)
        whole_numbers(by_layer)
        chosen = [rows[0], rows[min(len(rows) - 1, round(LATER_LAYER * len(rows)))]]
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
