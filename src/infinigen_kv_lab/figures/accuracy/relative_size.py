"""Figure 19: perplexity against the relative size of the KV cache, and against length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinigen_kv_lab.evals.perplexity import Perplexity
from infinigen_kv_lab.figures.accuracy.definition import (
    AccuracyFigure,
    AccuracySetting,
    Found,
    results_of,
    spread,
)
from infinigen_kv_lab.figures.accuracy.equal_share import at_share
from infinigen_kv_lab.figures.accuracy.scale import Span
from infinigen_kv_lab.figures.accuracy.trial import Trial
from infinigen_kv_lab.figures.definition import Row, names

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

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

    def trials(self, setting: AccuracySetting) -> list[Trial]:
        return [trial for _, _, trial in self._made(setting)]

    @staticmethod
    def _made(setting: AccuracySetting) -> list[tuple[str, float, Trial]]:
        """What varies (``share`` or ``length``), its value, and the trial."""
        scale = setting.scale
        spans = [("share", share, share, scale.sweep) for share in scale.shares]
        for length in scale.lengths:
            span = Span(
                window=length + scale.length_tokens,
                prompt_tokens=length,
                windows=scale.sweep.windows,
            )
            spans.append(("length", length, min(1.0, TOKENS / length), span))
        return [
            (varied, value, at_share(setting, policy, share, span))
            for varied, value, share, span in spans
            for policy in POLICIES
        ]

    def rows(self, setting: AccuracySetting, found: Found) -> list[Row]:
        rows: list[Row] = []
        for varied, value, trial in self._made(setting):
            for name, result in results_of(found, trial, Perplexity).items():
                rows.append(
                    {
                        "varied": varied,
                        "value": value,
                        "system": name,
                        **spread("perplexity", result.ppl),
                        **spread("perplexity_full", result.ppl_full),
                        **spread("ratio", result.ratio),
                        "kl": result.kl.value,
                        "fetched_percent": 100 * result.fetched_share,
                        "windows": result.windows,
                    }
                )
        return rows

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        from infinigen_kv_lab.figures.accuracy.drawing import curve, full_line
        from infinigen_kv_lab.figures.drawing import log_ticks, name_axes, plain_log

        sizes, lengths = canvas.panels(1, 2)[0]
        by_share = [row for row in rows if row["varied"] == "share"]
        by_length = [row for row in rows if row["varied"] == "length"]
        for name in names(rows):
            for axes, some, x, y in (
                (sizes, by_share, "fetched_percent", "perplexity"),
                (lengths, by_length, "value", "ratio"),
            ):
                mine = [row for row in some if row["system"] == name]
                curve(canvas, axes, mine, x, y, look=name)
        if by_share:
            full_line(canvas, sizes, by_share[0], "perplexity_full")
            sizes.set_xscale("log")
            plain_log(sizes.xaxis)
        lengths.set_xscale("log")
        log_ticks(lengths.xaxis, [row["value"] for row in by_length])
        for axes in (sizes, lengths):
            axes.set_yscale("log")
            axes.margins(y=0.08)
            plain_log(axes.yaxis)
        name_axes(sizes, "cached tokens attended to (%)", "perplexity")
        name_axes(lengths, f"prompt (tokens); {TOKENS} attended to", "perplexity over full cache's")
        canvas.legend(sizes, lengths)
