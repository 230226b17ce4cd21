"""Figure 20: how many queries attend to few tokens, by length; what single keys get over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinigen_kv_lab.evals.reading import FULL
from infinigen_kv_lab.evals.sparsity import FEW, MASS, Sparsity
from infinigen_kv_lab.figures.accuracy.definition import (
    AccuracyFigure,
    AccuracySetting,
    Found,
    results_of,
    spread,
)
from infinigen_kv_lab.figures.accuracy.looks import look_at_contexts
from infinigen_kv_lab.figures.accuracy.trial import Trial
from infinigen_kv_lab.figures.definition import Row

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

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

    def trials(self, setting: AccuracySetting) -> list[Trial]:
        return [look_at_contexts(setting)]

    def rows(self, setting: AccuracySetting, found: Found) -> list[Row]:
        (trial,) = self.trials(setting)
        result = results_of(found, trial, Sparsity).get(FULL)
        if result is None:
            return []
        rows: list[Row] = [
            _row(QUERIES, f"mean of {len(result.layers)} layers", each.length)
            | spread("percent", each.few.mean, 100)
            for each in result.lengths
        ]
        for track in result.tracks:
            label = f"{track.course}: token {track.key}, layer {track.layer}, head {track.head}"
            rows += [
                {**_row(KEY, label, position), "percent": 100 * weight}
                for position, weight in zip(track.positions, track.weights, strict=True)
            ]
        return rows

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        from infinigen_kv_lab.figures.accuracy.drawing import curve
        from infinigen_kv_lab.figures.drawing import log_ticks, name_axes

        shares, keys = canvas.panels(1, 2)[0]
        lengths = [row for row in rows if row["kind"] == QUERIES]
        label = lengths[0]["series"]
        curve(canvas, shares, lengths, "tokens", "percent", look="infinigen", label=label)
        shares.set_xscale("log")
        log_ticks(shares.xaxis, [row["tokens"] for row in lengths])
        shares.set_ylim(0, 100)
        tracks = [row for row in rows if row["kind"] == KEY]
        looks = ("ideal", "h2o", "infinigen-paper")
        for series, look in zip(
            dict.fromkeys(row["series"] for row in tracks), looks, strict=False
        ):
            mine = [row for row in tracks if row["series"] == series]
            style = {**canvas.style(look), "marker": ""}
            weights = [row["percent"] for row in mine]
            keys.plot([row["tokens"] for row in mine], weights, label=series, **style)
        keys.set_ylim(bottom=0)
        under = f"queries that need under {100 * FEW:g} % of them (%)"
        name_axes(shares, "context (tokens)", under)
        name_axes(keys, "position of the query (token)", "attention on the key (%)")
        canvas.legend(shares, keys, columns=2)


def _row(kind: str, series: str, tokens: int) -> Row:
    empty = dict.fromkeys(("percent", "percent_low", "percent_high"))
    return {"kind": kind, "series": series, "tokens": tokens, **empty}
