"""Beyond the paper: the speculation itself, by layer and head, its sources of error apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from infinigen_kv_lab.evals.agreement import MEASURES, VARIANTS
from infinigen_kv_lab.evals.speculation import Speculation
from infinigen_kv_lab.figures.accuracy.evaluation import Points
from infinigen_kv_lab.figures.accuracy.figure import AccuracyFigure, Cases, results_of
from infinigen_kv_lab.figures.accuracy.setting import AccuracySetting
from infinigen_kv_lab.figures.drawing import Canvas, heat_map, name_axes, whole_numbers
from infinigen_kv_lab.figures.rows import Row

POLICY = "infinigen"
LABELS = {
    "engine": ("engine", "infinigen"),
    "true_query": ("true query: error of the dimensions alone", "h2o"),
    "all_dimensions": ("all dimensions: error of the query alone", "streaming-llm"),
    "best": ("best choice of as many tokens", "ideal"),
}
AXES = {
    "recall": "recall",
    "coverage": "attention mass covered",
    "rank_correlation": "rank correlation",
    "divergence": "JS divergence (nats)",
}


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

    def cases(self, setting: AccuracySetting) -> Cases:
        return [({}, setting.look("speculation", POLICY))]

    def rows_of(self, result: Points) -> list[Row]:
        found = results_of(result, Speculation)[POLICY]
        rows = []
        for at, layer in enumerate(found.layers):
            row: Row = {"layer": layer, "chosen_share": found.chosen[at]}
            for variant in VARIANTS:
                for measure in MEASURES:
                    values = getattr(getattr(found, variant), measure).values[at]
                    row[f"{variant}_{measure}"] = float(np.nanmean(values))
            row["best_coverage"] = float(np.nanmean(found.best_coverage.values[at]))
            recalls = enumerate(found.engine.recall.values[at])
            rows.append({**row, **{f"recall_head_{head}": recall for head, recall in recalls}})
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
        panels = canvas.panels(3, 2, height=9.0)
        layers = [row["layer"] for row in rows]
        for axes, (measure, label) in zip(panels.flat, AXES.items(), strict=False):
            for variant, (name, look) in LABELS.items():
                column = f"{variant}_{measure}"
                if column in rows[0]:
                    canvas.curve(axes, rows, "layer", column, look=look, label=name, marker="")
            name_axes(axes, "layer", label)
        shares, recalls = panels[2]
        shown = [{**row, "percent": 100 * row["chosen_share"]} for row in rows]
        canvas.curve(shares, shown, "layer", "percent", look=POLICY, label="", marker="")
        shares.set_ylim(bottom=0)
        whole_numbers(*panels.flat[:-1])
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
        canvas.colour_bar(image, recalls, "recall of the engine")
        canvas.legend(*panels.flat, columns=2)
