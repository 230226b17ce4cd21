"""Figure 12: perplexity in chunks of decoded tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinigen_kv_lab.evals.perplexity import CHUNK, Perplexity
from infinigen_kv_lab.evals.reading import FULL
from infinigen_kv_lab.figures.accuracy.definition import (
    COMPARED,
    SHARE,
    AccuracyFigure,
    AccuracySetting,
    Found,
    interval,
    results_of,
    spread,
)
from infinigen_kv_lab.figures.accuracy.trial import Trial
from infinigen_kv_lab.figures.definition import Row, names

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas


APART = 8  # tokens between the dots of one chunk, so that none hides another


class Chunks(AccuracyFigure):
    name = "12"
    title = f"Perplexity in chunks of {CHUNK} decoded tokens"
    about = (
        "The prompt is read in full, then every token selects as a decode step does. On the right, "
        "the perplexity over that of the full cache on the same tokens, paired by window: does the "
        "gap grow with what was decoded? Vertical lines are intervals."
    )

    def trials(self, setting: AccuracySetting) -> list[Trial]:
        scale = setting.scale
        return [setting.reading(text, COMPARED, scale.text, budget=SHARE) for text in scale.texts]

    def rows(self, setting: AccuracySetting, found: Found) -> list[Row]:
        rows: list[Row] = []
        for trial in self.trials(setting):
            for policy, result in results_of(found, trial, Perplexity).items():
                rows += [
                    {
                        "text": trial.task,
                        "system": policy,
                        "decoded_until": chunk.end,
                        **spread("perplexity", chunk.ppl),
                        **spread("ratio", chunk.ratio),
                        "kl": chunk.kl,
                        "fetched_share": result.fetched_share,
                        **spread("ratio_of_all", result.ratio),
                        "gap_growth": result.gap_growth.value,
                        "windows": result.windows,
                    }
                    for chunk in result.chunks
                ]
        return rows

    def remarks(self, setting: AccuracySetting, rows: Sequence[Row]) -> list[str]:
        each = {(row["text"], row["system"]): row for row in rows if row["system"] != FULL}
        return [
            f"{text}, {name}: {row['ratio_of_all']:.3f}{interval(row, 'ratio_of_all')} times the "
            f"perplexity of the full cache at "
            f"{row['fetched_share']:.1%} fetched; the gap of the last chunk less that of the first "
            f"is {row['gap_growth']:+.2%}.".replace("%", " %")
            for (text, name), row in each.items()
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        from infinigen_kv_lab.figures.accuracy.drawing import curve
        from infinigen_kv_lab.figures.drawing import name_axes

        texts = list(dict.fromkeys(row["text"] for row in rows))
        panels = canvas.panels(len(texts), 2, height=1.4 + 3.2 * len(texts))
        for text, (absolute, relative) in zip(texts, panels, strict=True):
            for number, name in enumerate(names(rows)):
                mine = [
                    {**row, "place": row["decoded_until"] + APART * (number - 1.5)}
                    for row in rows
                    if row["system"] == name and row["text"] == text
                ]
                curve(canvas, absolute, mine, "place", "perplexity", look=name)
                curve(canvas, relative, mine, "place", "ratio", look=name)
            windows = next(row["windows"] for row in rows if row["text"] == text)
            places = sorted({row["decoded_until"] for row in rows})
            for each in (absolute, relative):
                each.set_xticks(places)
                each.set_xlim(places[0] - CHUNK // 3, places[-1] + CHUNK // 3)
            title = f"{text}, windows: {windows}"
            name_axes(absolute, "decoded tokens, up to", "perplexity of the chunk", title=title)
            name_axes(relative, "decoded tokens, up to", "perplexity over the full cache's")
        canvas.legend(*panels.flat)
