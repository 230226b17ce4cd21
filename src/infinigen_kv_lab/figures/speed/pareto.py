"""Beyond the paper: accuracy against link bytes, all policies at several settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infinigen_kv_lab.figures.drawing import Canvas, log_axes, name_axes
from infinigen_kv_lab.figures.rows import Row, names
from infinigen_kv_lab.figures.speed.figure import Cases, Results, SpeedFigure, one_system
from infinigen_kv_lab.figures.speed.peer_results import ACCURACY, PeerResults
from infinigen_kv_lab.figures.speed.setting import SpeedSetting
from infinigen_kv_lab.figures.styles import BLUE

BUDGETED = ("h2o", "scissorhands", "streaming-llm", "quest")
FIXED = ("stream", "stream-int8", "stream-int4", "paging", "paging-h2o")
EXACT = 1e-6  # nats; below it a system is as good as ideal
OURS = ("infinigen", "infinigen, no resident set")
CAP = 0.5  # of the cache: largest share that a step may attend to, where alpha is varied
SPAN = (0.01, 0.30)  # shares of stream's bytes between which the systems are compared


class Pareto(SpeedFigure):
    name = "pareto"
    title = "Accuracy against link bytes"
    about = (
        "KL(ideal || policy) of the next token, all systems fed what ideal writes. Budgets vary "
        "for h2o, scissorhands, streaming-llm and quest, alpha for the others, which may fetch up "
        f"to {CAP:.0%} of the cache here. Bytes are counted on a link that keeps nobody waiting. "
        "Where a press of another library keeps its cache on the device, what survives counts as "
        "if it crossed the link each step, as for h2o."
    ).replace("%", " %")

    def cases(self, setting: SpeedSetting) -> Cases:
        return [({}, setting.headline()), *self._varied(setting)]

    def _varied(self, setting: SpeedSetting) -> Cases:
        """What varies and the names that the policies are drawn under; the measurement."""
        scale = setting.scale
        common: dict[str, Any] = {
            "prompt_tokens": scale.prompt_tokens,
            "decode_tokens": scale.decode_tokens,
            "link": setting.counting_link,
        }
        variants: list[tuple[str, dict[str, str], dict[str, Any]]] = [
            (f"budget {budget:g}", {name: name for name in BUDGETED}, {"budget": budget})
            for budget in scale.budgets
        ]
        for alpha in scale.pareto_alphas:
            own = {"alpha": alpha, "max_fetch": CAP}
            bounds = {"infinigen": OURS[1], "oracle": "oracle, no resident set"}
            paper = "infinigen-paper"
            variants += [
                (f"alpha {alpha:g}", {"infinigen": OURS[0]}, own),
                (f"alpha {alpha:g}", bounds, {**own, "resident": 0.0}),
                (f"alpha {alpha:g}", {paper: paper}, {**own, "rehearsal": "paper"}),
            ]
        cases: Cases = []
        for varied, labels, changes in variants:
            shown = {name: label for name, label in labels.items() if name in setting.policies}
            if shown:
                measurement = setting.sweep(policies=tuple(shown), **common, **changes)
                cases.append(({"setting": varied, "labels": shown}, measurement))
        return cases

    def rows(self, setting: SpeedSetting, results: Results) -> list[Row]:
        base = results.get(setting.headline())
        streamed = None if base is None else one_system(base, "stream")
        if base is None or streamed is None:
            return []
        whole = streamed["link_mb_per_step"]
        shown: list[tuple[str, str, Row | None]] = [
            (name, "", one_system(base, name)) for name in FIXED
        ]
        for columns, measurement in self._varied(setting):
            if measurement in results:
                shown += [
                    (label, columns["setting"], one_system(results[measurement], name))
                    for name, label in columns["labels"].items()
                ]
        for program in _same_prompt(setting):
            for point in program.with_columns(ACCURACY):
                measured = {
                    "link_mb_per_step": point["link_bytes_per_token"] / 1e6,
                    "kl_to_ideal": point["kl_to_ideal"],
                }
                shown.append((point["system"], str(point.get("setting", "")), measured))
        return [
            {
                "system": system,
                "setting": varied,
                "link_mb_per_token": row["link_mb_per_step"],
                "share_of_stream": row["link_mb_per_step"] / whole if whole else 0.0,
                "kl_to_ideal": row["kl_to_ideal"],
            }
            for system, varied, row in shown
            if row is not None
        ]

    def remarks(self, setting: SpeedSetting, rows: Sequence[Row]) -> list[str]:
        said = [
            f"{program.path} was measured on another prompt and is left out: its settings must "
            "name the prompt that prompt.json holds."
            for program in setting.peer_results
            if program.with_columns(ACCURACY) and program not in _same_prompt(setting)
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
        axes = canvas.panels(height=6.2)[0][0]
        drawn = [
            {**row, "percent": 100 * row["share_of_stream"]}
            for row in rows
            if row["kl_to_ideal"] > EXACT and row["share_of_stream"] > 0
        ]
        canvas.curves(axes, drawn, "percent", "kl_to_ideal")
        span = [100 * share for share in SPAN]
        label = f"{span[0]:g} to {span[1]:g} % of stream's bytes"
        axes.set(xscale="log", yscale="log")
        axes.margins(0.05)
        axes.axvspan(*span, color=BLUE, alpha=0.07, linewidth=0, label=label)
        log_axes(axes, "xy")
        whole = next(row["link_mb_per_token"] for row in rows if row["system"] == "stream")
        bytes_label = f"link bytes per token (% of the {whole:.3g} MB that stream moves)"
        name_axes(axes, bytes_label, "KL to ideal (nats)")
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


def _same_prompt(setting: SpeedSetting) -> list[PeerResults]:
    """Those of the other programs that read the headline prompt."""
    return [
        program
        for program in setting.peer_results
        if program.settings.get("prompt_sha256") == setting.prompt_digest
    ]
