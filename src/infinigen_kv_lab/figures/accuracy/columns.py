"""Figure 7: few columns of the skewed queries and keys carry most of their magnitude."""

from __future__ import annotations

from collections.abc import Sequence

from infinigen_kv_lab.evals.reading import FULL
from infinigen_kv_lab.evals.skewing import SERIES, TOP, Skewing
from infinigen_kv_lab.figures.accuracy.evaluation import Points
from infinigen_kv_lab.figures.accuracy.figure import AccuracyFigure, Cases, results_of
from infinigen_kv_lab.figures.accuracy.setting import AccuracySetting
from infinigen_kv_lab.figures.drawing import Canvas, name_axes, whole_numbers
from infinigen_kv_lab.figures.rows import Row
from infinigen_kv_lab.figures.styles import GREY

LOOKS = {
    "query": ("query", "infinigen-paper"),
    "query_skewed": ("query, skewed", "infinigen"),
    "key": ("key", "scissorhands"),
    "key_skewed": ("key, skewed", "h2o"),
}


class Columns(AccuracyFigure):
    name = "7"
    title = "Columns of queries and keys before and after the paper's skew"
    intervals = False
    about = (
        "The magnitude of a column is its sum of absolute values over the tokens; each head's "
        "columns are ordered by themselves, and the shares are means over heads. On the left the "
        f"layer in the middle, on the right what the largest {TOP:.0%} of the columns carry: the "
        "partial columns of the paper's rehearsal. Queries and keys are taken as the attention "
        "uses them, after any rotary positions."
    ).replace("%", " %")

    def cases(self, setting: AccuracySetting) -> Cases:
        return [({}, setting.look("skew"))]

    def rows_of(self, result: Points) -> list[Row]:
        found = results_of(result, Skewing)[FULL]
        return [
            {
                "layer": layer,
                "tensor": name,
                "top_share": getattr(found, name).values[at],
                **{f"column_{i}": part for i, part in enumerate(found.curves[name][at])},
            }
            for at, layer in enumerate(found.layers)
            for name in SERIES
        ]

    def remarks(self, setting: AccuracySetting, rows: Sequence[Row]) -> list[str]:
        said = []
        for name, (label, _) in LOOKS.items():
            shares = [row["top_share"] for row in rows if row["tensor"] == name]
            said.append(f"{label} {100 * sum(shares) / len(shares):.1f} %")
        top = f"What the largest {100 * TOP:g} % of the columns carry, mean over layers"
        return [f"{top}: {'; '.join(said)}."]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        curves, tops = canvas.panels(1, 2)[0]
        layers = sorted({row["layer"] for row in rows})
        middle = layers[len(layers) // 2]
        columns = [name for name in rows[0] if name.startswith("column_")]
        even = 100 / len(columns)
        curves.axhline(even, color=GREY, linestyle=":", linewidth=1.2, label="all the same")
        for name, (label, system) in LOOKS.items():
            mine = {row["layer"]: row for row in rows if row["tensor"] == name}
            style = {**canvas.style(system), "marker": ""}
            shares = [100 * mine[middle][column] for column in columns]
            curves.plot(range(1, len(columns) + 1), shares, label=label, **style)
            values = [100 * mine[layer]["top_share"] for layer in layers]
            tops.plot(layers, values, label=label, **style)
        tops.axhline(100 * TOP, color=GREY, linestyle=":", linewidth=1.2)
        for each in (curves, tops):
            each.set_ylim(bottom=0)
        tops.set_ylim(top=100)
        whole_numbers(tops)
        name_axes(curves, "column of the head, largest first", f"magnitude (%), layer {middle}")
        name_axes(tops, "layer", f"in the largest {100 * TOP:g} % of the columns (%)")
        canvas.legend(curves, tops, columns=5)
