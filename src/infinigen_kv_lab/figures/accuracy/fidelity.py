"""Beyond the paper: the speculation itself, by layer and head, its sources of error apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from infinigen_kv_lab.evals.agreement import MEASURES, VARIANTS
from infinigen_kv_lab.evals.speculation import Speculation
from infinigen_kv_lab.figures.accuracy.definition import (
    AccuracyFigure,
    AccuracySetting,
    Found,
    results_of,
)
from infinigen_kv_lab.figures.accuracy.trial import Trial
from infinigen_kv_lab.figures.definition import Row

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

POLICY = "infinigen"
LABELS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "engine": ("engine", "infinigen"),
        "true_query": ("true query: error of the dimensions alone", "h2o"),
        "all_dimensions": ("all dimensions: error of the query alone", "streaming-llm"),
        "best": ("best choice of as many tokens", "ideal"),
    }
)
AXES: Mapping[str, str] = MappingProxyType(
    {
        "recall": "recall",
        "coverage": "attention mass covered",
        "rank_correlation": "rank correlation",
        "divergence": "JS divergence (nats)",
    }
)


class Fidelity(AccuracyFigure):
    name = "speculation"
    title = "The speculation against the true scores, by layer and head"
    intervals = False
    about = (
        "Recall: of the tokens chosen beyond the always-kept ones, the share that the true scores "
        "would have chosen, at the engine's count. Coverage: attention mass on what is attended "
        "to. Rank correlation (Spearman) and Jensen-Shannon divergence (at most ln 2 = 0.69) "
        "compare the scores over all tokens. With the true query only the partial dimensions err, "
        "with all dimensions only the predicted query. All other layers attend in full, so that no "
        "error is inherited."
    )

    def trials(self, setting: AccuracySetting) -> list[Trial]:
        scale = setting.scale
        return [setting.reading("speculation", (POLICY,), replace(scale.text, windows=scale.looks))]

    def rows(self, setting: AccuracySetting, found: Found) -> list[Row]:
        (trial,) = self.trials(setting)
        result = results_of(found, trial, Speculation).get(POLICY)
        if result is None:
            return []
        heads = len(result.engine.recall.values[0])
        rows = []
        for at, layer in enumerate(result.layers):
            row: Row = {"layer": layer, "chosen_share": result.chosen[at]}
            for variant in VARIANTS:
                for measure in MEASURES:
                    values = getattr(getattr(result, variant), measure).values[at]
                    row[f"{variant}_{measure}"] = float(np.nanmean(values))
            row["best_coverage"] = float(np.nanmean(result.best_coverage.values[at]))
            recall = result.engine.recall.values[at]
            row.update({f"recall_head_{head}": recall[head] for head in range(heads)})
            rows.append(row)
        return rows

    def remarks(self, setting: AccuracySetting, rows: Sequence[Row]) -> list[str]:
        worst = min(rows, key=lambda row: row["engine_recall"])
        losses = {
            name: sum(1 - row[f"{variant}_recall"] for row in rows) / len(rows)
            for name, variant in (("partial dimensions", "true_query"), ("query", "all_dimensions"))
        }
        larger = max(losses, key=losses.__getitem__)
        return [
            f"Lowest recall: layer {worst['layer']}, {worst['engine_recall']:.2f}.",
            f"The larger source of error is the {larger}: alone, the partial dimensions lose "
            f"{losses['partial dimensions']:.2f} of the recall and the predicted query "
            f"{losses['query']:.2f}.",
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        from infinigen_kv_lab.figures.accuracy.drawing import colour_bar, heat_map
        from infinigen_kv_lab.figures.drawing import name_axes

        panels = canvas.panels(3, 2, height=9.0)
        layers = [row["layer"] for row in rows]
        for axes, (measure, label) in zip(panels.flat, AXES.items(), strict=False):
            for variant in (*VARIANTS, "best"):
                column = f"{variant}_{measure}"
                if column in rows[0]:
                    name, look = LABELS[variant]
                    style = {**canvas.style(look), "marker": ""}
                    axes.plot(layers, [row[column] for row in rows], label=name, **style)
            axes.xaxis.get_major_locator().set_params(integer=True)
            name_axes(axes, "layer", label)
        shares, recalls = panels[2]
        values = [100 * row["chosen_share"] for row in rows]
        shares.plot(layers, values, **{**canvas.style(POLICY), "marker": ""})
        shares.set_ylim(bottom=0)
        shares.xaxis.get_major_locator().set_params(integer=True)
        name_axes(shares, "layer", "tokens chosen (%)")
        columns = [name for name in rows[0] if name.startswith("recall_head_")]
        step = max(1, len(layers) // 8)
        image = heat_map(
            recalls,
            [[row[column] for row in rows] for column in columns],
            [str(layer) if at % step == 0 else "" for at, layer in enumerate(layers)],
            [name.removeprefix("recall_head_") for name in columns],
        )
        name_axes(recalls, "layer", "KV head")
        colour_bar(canvas, image, recalls, "recall of the engine")
        canvas.legend(*panels.flat, columns=2)
