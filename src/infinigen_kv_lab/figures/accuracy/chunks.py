"""Figure 12: perplexity in chunks of decoded tokens."""

from __future__ import annotations

from collections.abc import Sequence

from infinigen_kv_lab.evals.perplexity import CHUNK, Perplexity
from infinigen_kv_lab.evals.reading import FULL
from infinigen_kv_lab.figures.accuracy.evaluation import Points
from infinigen_kv_lab.figures.accuracy.figure import AccuracyFigure, Cases, results_of
from infinigen_kv_lab.figures.accuracy.setting import COMPARED, SHARE, AccuracySetting
from infinigen_kv_lab.figures.drawing import Canvas, name_axes
from infinigen_kv_lab.figures.rows import Row, interval, names, rows_with, spread

APART = 8  # tokens between the dots of one chunk, so that none hides another


class Chunks(AccuracyFigure):
    name = "12"
    title = f"Perplexity in chunks of {CHUNK} decoded tokens"
    about = (
        "The prompt is read in full, then every token selects as a decode step does. On the right, "
        "the perplexity over that of the full cache on the same tokens, paired by window: does the "
        "gap grow with what was decoded? Vertical lines are intervals."
    )

    def cases(self, setting: AccuracySetting) -> Cases:
        scale = setting.scale
        return [
            ({"text": text}, setting.reading(text, COMPARED, scale.text, budget=SHARE))
            for text in scale.texts
        ]

    def rows_of(self, result: Points) -> list[Row]:
        return [
            {
                "system": policy,
                "decoded_until": chunk.end,
                **spread("perplexity", chunk.ppl),
                **spread("ratio", chunk.ratio),
                "kl": chunk.kl,
                "fetched_share": found.fetched_share,
                **spread("ratio_of_all", found.ratio),
                "gap_growth": found.gap_growth.value,
                "windows": found.windows,
            }
            for policy, found in results_of(result, Perplexity).items()
            for chunk in found.chunks
        ]

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
        texts, systems = names(rows, "text"), names(rows)
        panels = canvas.panels(len(texts), 2, height=1.4 + 3.2 * len(texts))
        places = sorted({row["decoded_until"] for row in rows})
        apart = [
            {**row, "place": row["decoded_until"] + APART * (systems.index(row["system"]) - 1.5)}
            for row in rows
        ]
        for text, (absolute, relative) in zip(texts, panels, strict=True):
            mine = rows_with(apart, text=text)
            canvas.curves(absolute, mine, "place", "perplexity")
            canvas.curves(relative, mine, "place", "ratio")
            for each in (absolute, relative):
                each.set_xticks(places)
                each.set_xlim(places[0] - CHUNK // 3, places[-1] + CHUNK // 3)
            title = f"{text}, windows: {mine[0]['windows']}"
            name_axes(absolute, "decoded tokens, up to", "perplexity of the chunk", title=title)
            name_axes(relative, "decoded tokens, up to", "perplexity over the full cache's")
        canvas.legend(*panels.flat)
