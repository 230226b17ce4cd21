"""Figure 20: how many queries attend to few tokens, by length; what single keys get over time."""

from __future__ import annotations

from collections.abc import Sequence

from infinigen_kv_lab.evals.reading import FULL
from infinigen_kv_lab.evals.sparsity import FEW, MASS, Sparsity
from infinigen_kv_lab.figures.accuracy.evaluation import Points
from infinigen_kv_lab.figures.accuracy.figure import AccuracyFigure, Cases, results_of
from infinigen_kv_lab.figures.accuracy.setting import AccuracySetting
from infinigen_kv_lab.figures.drawing import Canvas, log_axes, name_axes
from infinigen_kv_lab.figures.rows import Row, names, rows_with, spread

QUERIES, KEY = "queries", "key"


class SparseQueries(AccuracyFigure):
    name = "20"
    title = "Queries that attend to few tokens, and single keys over time"
    about = (
        f"A query attends to few tokens where fewer than {FEW:.0%} of those before it make up "
        f"{MASS} of its attention; the mean over heads and layers. On the right, what three keys "
        "(the first four of the text apart) get from later queries of one head, means over some "
        "steps: the one with the largest weight, and those that have risen and fallen most. A key "
        "that nobody needed for long may come back, so that dropping it for good loses something."
    ).replace("%", " %")

    def cases(self, setting: AccuracySetting) -> Cases:
        return [({}, setting.look_at_contexts())]

    def rows_of(self, result: Points) -> list[Row]:
        found = results_of(result, Sparsity)[FULL]
        mean = f"mean of {len(found.layers)} layers"
        rows: list[Row] = [
            {"kind": QUERIES, "series": mean, "tokens": each.length}
            | spread("percent", each.few.mean, 100)
            for each in found.lengths
        ]
        for track in found.tracks:
            label = f"{track.course}: token {track.key}, layer {track.layer}, head {track.head}"
            rows += [
                {"kind": KEY, "series": label, "tokens": position, **spread("percent", None)}
                | {"percent": 100 * weight}
                for position, weight in zip(track.positions, track.weights, strict=True)
            ]
        return rows

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        shares, keys = canvas.panels(1, 2)[0]
        lengths = rows_with(rows, kind=QUERIES)
        label = lengths[0]["series"]
        canvas.curve(shares, lengths, "tokens", "percent", look="infinigen", label=label)
        log_axes(shares, "x", places=[row["tokens"] for row in lengths])
        shares.set_ylim(0, 100)
        tracks = names(rows_with(rows, kind=KEY), "series")
        for track, look in zip(tracks, ("ideal", "h2o", "infinigen-paper"), strict=False):
            mine = rows_with(rows, series=track)
            canvas.curve(keys, mine, "tokens", "percent", look=look, label=track, marker="")
        keys.set_ylim(bottom=0)
        under = f"queries that need under {100 * FEW:g} % of them (%)"
        name_axes(shares, "context (tokens)", under)
        name_axes(keys, "position of the query (token)", "attention on the key (%)")
        canvas.legend(shares, keys, columns=2)
