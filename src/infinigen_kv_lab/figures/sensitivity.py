"""Figure 17: accuracy and latency by alpha and by partial ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv_lab.figures.definition import Figure, Found, Row, Setting, one_system
from infinigen_kv_lab.figures.point import Point

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

PAPER_CHOICE: Mapping[str, float] = MappingProxyType({"alpha": 4.0, "partial_ratio": 0.3})
"""Of the paper, for OPT."""
LABELS = {"alpha": "alpha (nats)", "partial_ratio": "partial ratio (share of D)"}
KL, SPEED, PERPLEXITY, SHARE = "#0072B2", "#D55E00", "#0072B2", "#009E73"


class Sensitivity(Figure):
    name = "17"
    title = "Accuracy and latency of infinigen by alpha and partial ratio"
    about = (
        "KL(full || selected) and perplexity are teacher-forced on a text, latency is measured "
        "over the link; where one setting varies, the other has its default. Solid lines belong "
        "to the axis on the left, dashed ones to that on the right. The vertical lines are the "
        "paper's choice for OPT."
    )

    def points(self, setting: Setting) -> list[Point]:
        return [each for _, _, *both in self._pairs(setting) for each in both]

    def _pairs(self, setting: Setting) -> list[tuple[str, float, Point, Point]]:
        """What varies, its value, and the points of latency and accuracy."""
        scale, default = setting.scale, InfiniGenConfig()
        found = []
        for name, values in (("alpha", scale.alphas), ("partial_ratio", scale.ratios)):
            for value in values:
                changes = {} if value == getattr(default, name) else {name: value}
                own = {"policies": ("infinigen",), **changes}
                text = {"kind": "fidelity", "link": "none", "decode_tokens": scale.text_tokens}
                found.append((name, value, setting.sweep(**own), setting.sweep(**own, **text)))
        return found

    def rows(self, setting: Setting, found: Found) -> list[Row]:
        rows = []
        for name, value, speed, accuracy in self._pairs(setting):
            if speed not in found or accuracy not in found:
                continue
            step = one_system(found[speed], "infinigen")
            text = found[accuracy]
            assert step is not None
            rows.append(
                {
                    "varied": name,
                    "value": value,
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
        from infinigen_kv_lab.figures.drawing import PAPER, name_axes, plain_log, upright

        axes = canvas.panels(2, 2, height=6.4, sharex="col")
        for column, name in enumerate(LABELS):
            own = [row for row in rows if row["varied"] == name]
            if not own:
                continue
            top, bottom = axes[0][column], axes[1][column]
            x = [row["value"] for row in own]
            self._pair(top, x, own, ("kl", "KL (nats)", KL), ("step_ms", "step (ms)", SPEED))
            top.set_yscale("log")
            top.margins(y=0.15)
            plain_log(top.yaxis)
            shares = [{**row, "percent": 100 * row["fetched_share"]} for row in own]
            left = ("perplexity", "perplexity", PERPLEXITY)
            self._pair(bottom, x, shares, left, ("percent", "fetched (% of the cache)", SHARE))
            full = own[0]["perplexity_full"]
            bottom.axhline(
                full,
                color="black",
                linestyle=(0, (1, 1)),
                linewidth=1.2,
                label="perplexity, full attention",
            )
            chosen = PAPER_CHOICE[name]
            upright(top, chosen, f"the paper: {chosen:g}")
            bottom.axvline(
                chosen,
                color=PAPER,
                linestyle=(0, (5, 3)),
                linewidth=1.2,
                label="the paper's choice",
            )
            name_axes(bottom, LABELS[name], bottom.get_ylabel())
        canvas.legend(*axes[1])

    @staticmethod
    def _pair(
        axes: Any,
        x: list[float],
        rows: Sequence[Row],
        left: tuple[str, str, str],
        right: tuple[str, str, str],
    ) -> None:
        """Two curves on two axes, each in the colour of its axis."""
        twin = axes.twinx()
        twin.spines["top"].set_visible(False)
        for each, (column, label, color), marker in ((axes, left, "o"), (twin, right, "s")):
            line = "-" if marker == "o" else "--"
            each.plot(
                x,
                [row[column] for row in rows],
                color=color,
                marker=marker,
                markersize=5,
                linestyle=line,
            )
            each.set_ylabel(label, color=color, fontsize=10)
            each.tick_params(axis="y", colors=color, labelsize=9)
        twin.set_ylim(0, 1.12 * max(row[right[0]] for row in rows))
