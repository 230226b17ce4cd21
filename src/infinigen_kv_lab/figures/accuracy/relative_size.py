"""Figure 19: perplexity against the relative size of the KV cache, and against length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from infinigen_kv_lab.evals.perplexity import Perplexity
from infinigen_kv_lab.evals.reading import FULL
from infinigen_kv_lab.figures.accuracy.evaluation import Points
from infinigen_kv_lab.figures.accuracy.figure import AccuracyFigure, Cases, results_of
from infinigen_kv_lab.figures.accuracy.setting import AccuracySetting
from infinigen_kv_lab.figures.drawing import Canvas, log_axes, name_axes
from infinigen_kv_lab.figures.rows import Row, rows_with, spread

TOKENS = 64  # at every length
POLICIES = ("infinigen", "infinigen-paper", "h2o")


class RelativeSize(AccuracyFigure):
    name = "19"
    title = "Perplexity against the KV cache that is attended to, and against length"
    about = (
        "On the left every policy attends to the same share of the cached tokens: InfiniGen to "
        "those of the highest rehearsed scores, with no threshold, and to the newest 32 tokens and "
        f"the first one in any case. On the right to a fixed number, {TOKENS} tokens, whatever the "
        "length. Vertical lines are intervals, paired by window."
    )

    def cases(self, setting: AccuracySetting) -> Cases:
        scale = setting.scale
        spans = [("share", share, share, scale.sweep) for share in scale.shares]
        for length in scale.lengths:
            span = replace(scale.sweep, window=length + scale.length_tokens, prompt_tokens=length)
            spans.append(("length", length, min(1.0, TOKENS / length), span))
        return [
            ({"varied": varied, "value": value}, setting.at_share(policy, share, span))
            for varied, value, share, span in spans
            for policy in POLICIES
        ]

    def rows_of(self, result: Points) -> list[Row]:
        return [
            {
                "system": name,
                **spread("perplexity", found.ppl),
                **spread("perplexity_full", found.ppl_full),
                **spread("ratio", found.ratio),
                "kl": found.kl.value,
                "fetched_percent": 100 * found.fetched_share,
                "windows": found.windows,
            }
            for name, found in results_of(result, Perplexity).items()
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        sizes, lengths = canvas.panels(1, 2)[0]
        by_share, by_length = (rows_with(rows, varied=each) for each in ("share", "length"))
        canvas.curves(sizes, by_share, "fetched_percent", "perplexity")
        canvas.curves(lengths, by_length, "value", "ratio")
        for row in by_share[:1]:
            canvas.across(sizes, row, "perplexity_full", look=FULL, label="full cache")
        for axes in (sizes, lengths):
            axes.margins(y=0.08)
        log_axes(sizes, "xy" if by_share else "y")
        log_axes(lengths, "xy", places=[row["value"] for row in by_length])
        name_axes(sizes, "cached tokens attended to (%)", "perplexity")
        name_axes(lengths, f"prompt (tokens); {TOKENS} attended to", "perplexity over full cache's")
        canvas.legend(sizes, lengths)
