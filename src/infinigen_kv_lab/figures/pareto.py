"""Beyond the paper: accuracy against link bytes, all policies at several settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from infinigen_kv_lab.figures.definition import (
    Figure,
    Found,
    Row,
    Setting,
    names,
    one_system,
    series,
)
from infinigen_kv_lab.figures.guests import ACCURACY
from infinigen_kv_lab.figures.point import Point

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

BUDGETED = ("h2o", "scissorhands", "streaming-llm", "quest")
FIXED = ("stream", "stream-int8", "stream-int4", "paging", "paging-h2o")
EXACT = 1e-6  # nats; below it a system is as good as ideal
OURS = ("infinigen", "infinigen, no resident set")
CAP = 0.5  # of the cache: largest share that a step may attend to, where alpha is varied
SPAN = (0.01, 0.30)  # shares of stream's bytes between which the systems are compared


class Pareto(Figure):
    name = "pareto"
    title = "Accuracy against link bytes"
    about = (
        "KL(ideal || policy) of the next token, all systems fed what ideal writes. Budgets vary "
        "for h2o, scissorhands, streaming-llm and quest, alpha for the others, which may fetch up "
        f"to {CAP:.0%} of the cache here. Bytes are counted on a link that keeps nobody waiting. "
        "Where a press of another library keeps its cache on the device, what survives counts as "
        "if it crossed the link each step, as for h2o."
    ).replace("%", " %")

    def points(self, setting: Setting) -> list[Point]:
        return [setting.base(), *(point for _, point, _ in self._made(setting))]

    def _made(self, setting: Setting) -> list[tuple[str, Point, dict[str, str]]]:
        """What a point varies, the point, and its policies with the names they are drawn under."""
        scale = setting.scale
        common: dict[str, Any] = {
            "prompt_tokens": scale.prompt_tokens,
            "decode_tokens": scale.decode_tokens,
            "link": setting.counting_link,
        }
        budgeted = {name: name for name in BUDGETED if name in setting.policies}
        made = [
            (
                f"budget {budget:g}",
                setting.sweep(policies=tuple(budgeted), budget=budget, **common),
                budgeted,
            )
            for budget in scale.budgets
            if budgeted
        ]
        for alpha in scale.pareto_alphas:
            own = {**common, "alpha": alpha, "max_fetch": CAP}
            variants: list[tuple[dict[str, str], dict[str, Any]]] = [
                ({"infinigen": OURS[0]}, {}),
                ({"infinigen": OURS[1], "oracle": "oracle, no resident set"}, {"resident": 0.0}),
                ({"infinigen-paper": "infinigen-paper"}, {"rehearsal": "paper"}),
            ]
            for shown, changes in variants:
                shown = {name: label for name, label in shown.items() if name in setting.policies}
                if shown:
                    point = setting.sweep(policies=tuple(shown), **own, **changes)
                    made.append((f"alpha {alpha:g}", point, shown))
        return made

    def rows(self, setting: Setting, found: Found) -> list[Row]:
        base = found.get(setting.base())
        streamed = one_system(base, "stream") if base is not None else None
        if base is None or streamed is None:
            return []
        whole = streamed["link_mb_per_step"] / setting.base().batch
        rows = []
        for name in FIXED:
            measured = one_system(base, name)
            if measured is not None:
                rows.append(_row(name, "", measured, whole))
        for varied, point, shown in self._made(setting):
            for name, label in shown.items():
                measured = one_system(found[point], name) if point in found else None
                if measured is not None:
                    rows.append(_row(label, varied, measured, whole))
        return rows + self._guests(setting, whole)

    @staticmethod
    def _guests(setting: Setting, whole: float) -> list[Row]:
        rows = []
        for guest in setting.guests:
            if guest.settings.get("prompt_sha256") != setting.prompt_digest:
                continue
            for point in guest.with_columns(ACCURACY):
                measured = {
                    "link_mb_per_step": point["link_bytes_per_token"] / 1e6,
                    "kl_to_ideal": point["kl_to_ideal"],
                }
                varied = str(point.get("setting", ""))
                rows.append(_row(point["system"], varied, measured, whole))
        return rows

    def remarks(self, setting: Setting, rows: Sequence[Row]) -> list[str]:
        said = [
            f"{guest.path} was measured on another prompt and is left out: its settings must name "
            f"the prompt that prompt.json holds."
            for guest in setting.guests
            if guest.with_columns(ACCURACY)
            and guest.settings.get("prompt_sha256") != setting.prompt_digest
        ]
        exact = names([row for row in rows if row["kl_to_ideal"] <= EXACT])
        if exact:
            said.append(f"Not drawn, since their KL is below {EXACT:g}: {', '.join(exact)}.")
        below = below_ours(rows)
        where = f"between {SPAN[0]:.0%} and {SPAN[1]:.0%} of stream's bytes".replace("%", " %")
        if below:
            which = ", ".join(f"{row['system']} {row['setting']}".strip() for row in below)
            said.append(f"No infinigen point has as few bytes and as low a KL, {where}: {which}.")
        else:
            said.append(f"No system but the oracle lies below infinigen {where}.")
        return said

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        from infinigen_kv_lab.figures.drawing import name_axes, plain_log

        axes = canvas.panels(height=6.2)[0][0]
        drawn = [
            {**row, "percent": 100 * row["share_of_stream"]}
            for row in rows
            if row["kl_to_ideal"] > EXACT and row["share_of_stream"] > 0
        ]
        for name in names(drawn):
            canvas.line(axes, name, *series(drawn, name, "percent", "kl_to_ideal"))
        whole = next(row["link_mb_per_token"] for row in rows if row["system"] == "stream")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.margins(0.05)
        span = [100 * share for share in SPAN]
        label = f"{span[0]:g} to {span[1]:g} % of stream's bytes"
        axes.axvspan(*span, color="#0072B2", alpha=0.07, linewidth=0, label=label)
        plain_log(axes.xaxis)
        plain_log(axes.yaxis)
        name_axes(
            axes,
            f"link bytes per token (% of the {whole:.3g} MB that stream moves)",
            "KL to ideal (nats)",
        )
        canvas.legend(axes, columns=3)


def below_ours(rows: Sequence[Row]) -> list[Row]:
    """Points of other systems, the oracle apart, that no infinigen point beats or equals.

    One does if it moves no more bytes and has no higher KL. Only points within `SPAN` count.
    """
    ours = [row for row in rows if row["system"] in OURS]
    others = [
        row
        for row in rows
        if row["system"] not in OURS
        and not row["system"].startswith("oracle")
        and SPAN[0] <= row["share_of_stream"] <= SPAN[1]
    ]
    return [row for row in others if not any(_beats(own, row) for own in ours)]


def _beats(own: Row, other: Row) -> bool:
    fewer = own["share_of_stream"] <= other["share_of_stream"]
    return bool(fewer and own["kl_to_ideal"] <= other["kl_to_ideal"])


def _row(system: str, setting: str, measured: Row, whole: float) -> Row:
    moved = measured["link_mb_per_step"]
    return {
        "system": system,
        "setting": setting,
        "link_mb_per_token": moved,
        "share_of_stream": moved / whole if whole else 0.0,
        "kl_to_ideal": measured["kl_to_ideal"],
    }
