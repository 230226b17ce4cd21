"""Figure 17: accuracy and latency by alpha and by partial ratio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv_lab.figures.drawing import Canvas, log_axes, upright
from infinigen_kv_lab.figures.rows import Row, rows_with
from infinigen_kv_lab.figures.speed.figure import Cases, Results, SpeedFigure, one_system
from infinigen_kv_lab.figures.speed.measurement import SpeedMeasurement
from infinigen_kv_lab.figures.speed.setting import SpeedSetting
from infinigen_kv_lab.figures.styles import BLUE, GREEN, RED

PAPER_CHOICE = {"alpha": 4.0, "partial_ratio": 0.3}
"""Of the paper, for OPT."""
LABELS = {"alpha": "alpha (nats)", "partial_ratio": "partial ratio (share of D)"}


class Sensitivity(SpeedFigure):
    name = "17"
    title = "Accuracy and latency of infinigen by alpha and partial ratio"
    about = (
        "KL(full || selected) and perplexity are teacher-forced on a text, latency is measured "
        "over the link; where one setting varies, the other has its default. Solid lines belong "
        "to the axis on the left, dashed ones to that on the right. The vertical lines are the "
        "paper's choice for OPT."
    )

    def cases(self, setting: SpeedSetting) -> Cases:
        pairs = self._pairs(setting)
        return [({}, measurement) for _, *pair in pairs for measurement in pair]

    def _pairs(self, setting: SpeedSetting) -> list[tuple[Row, SpeedMeasurement, SpeedMeasurement]]:
        """What varies with its value, and the measurements of latency and accuracy."""
        scale, default = setting.scale, InfiniGenConfig()
        text = {"kind": "fidelity", "link": "none", "decode_tokens": scale.text_tokens}
        pairs = []
        for name, values in (("alpha", scale.alphas), ("partial_ratio", scale.ratios)):
            for value in values:
                changes = {} if value == getattr(default, name) else {name: value}
                own = {"policies": ("infinigen",), **changes}
                columns: Row = {"varied": name, "value": value}
                pairs.append((columns, setting.sweep(**own), setting.sweep(**own, **text)))
        return pairs

    def rows(self, setting: SpeedSetting, results: Results) -> list[Row]:
        rows = []
        for columns, speed, accuracy in self._pairs(setting):
            if speed not in results or accuracy not in results:
                continue
            step, text = one_system(results[speed], "infinigen"), results[accuracy]
            assert step is not None
            rows.append(
                {
                    **columns,
                    "step_ms": step["step_ms"],
                    "link_mb_per_step": step["link_mb_per_step"],
                    "kl": text["kl_mean"],
                    "perplexity": text["ppl"],
                    "perplexity_full": text["ppl_full"],
                    "fetched_share": text["fetched_share"],
                }
            )
        return rows

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        axes = canvas.panels(2, 2, height=6.4, sharex="col")
        for (top, bottom), (name, label) in zip(axes.T, LABELS.items(), strict=True):
            own = rows_with(rows, varied=name)
            if not own:
                continue
            x = [row["value"] for row in own]
            _on_the_left(top, x, [row["kl"] for row in own], "KL (nats)")
            _on_the_right(top, x, [row["step_ms"] for row in own], "step (ms)", RED)
            log_axes(top, "y", margin=0.15)
            _on_the_left(bottom, x, [row["perplexity"] for row in own], "perplexity")
            shares = [100 * row["fetched_share"] for row in own]
            _on_the_right(bottom, x, shares, "fetched (% of the cache)", GREEN)
            bottom.axhline(
                own[0]["perplexity_full"],
                color="black",
                linestyle=(0, (1, 1)),
                linewidth=1.2,
                label="perplexity, full attention",
            )
            upright(top, PAPER_CHOICE[name], f"the paper: {PAPER_CHOICE[name]:g}")
            upright(bottom, PAPER_CHOICE[name], label="the paper's choice")
            bottom.set_xlabel(label, fontsize=10)
        canvas.legend(*axes[1])


def _on_the_left(axes: Any, x: list[float], y: list[float], label: str) -> None:
    """A solid curve, in the colour of its axis."""
    axes.plot(x, y, color=BLUE, marker="o", markersize=5)
    _colour(axes, label, BLUE)


def _on_the_right(axes: Any, x: list[float], y: list[float], label: str, color: str) -> None:
    """A dashed curve with an axis of its own, in its colour."""
    twin = axes.twinx()
    twin.spines["top"].set_visible(False)
    twin.plot(x, y, color=color, marker="s", markersize=5, linestyle="--")
    twin.set_ylim(0, 1.12 * max(y))
    _colour(twin, label, color)


def _colour(axes: Any, label: str, color: str) -> None:
    axes.set_ylabel(label, color=color, fontsize=10)
    axes.tick_params(axis="y", colors=color, labelsize=9)
