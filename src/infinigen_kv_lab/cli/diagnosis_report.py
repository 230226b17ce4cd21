"""A diagnosis on the terminal: the layers, the whole model, the verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from infinigen_kv_lab.diagnosis.wording import join_layers, percent

if TYPE_CHECKING:
    from infinigen_kv_lab.diagnosis import Diagnosis, LayerEvidence
    from infinigen_kv_lab.diagnosis.measure import PolicyFigures

WIDTH = 100
STYLES = {"suitable": "bold green", "suitable with care": "bold yellow", "unsuitable": "bold red"}
NOTE = (
    "similarity: cosine with the previous layer's attention input. query missed: share of its "
    "power, by the layer's own weights and as used. recall: engine (true query, all dimensions). "
    "mass: on the chosen tokens, and on as many chosen best. 0.9 in: share of the context that "
    "carries 0.9 of the mass. KL alone: this layer selecting alone. !: weak."
)


def print_report(diagnosis: Diagnosis, title: str) -> None:
    """At most `WIDTH` columns on stdout, in colour where that is a terminal."""
    console = Console()
    colour = "auto" if console.is_terminal else None
    width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    console = Console(width=width, color_system=colour, highlight=False)  # type: ignore[arg-type]
    console.print(Text(title, style="bold"))
    console.print(_layers(diagnosis.layers, diagnosis.verdict.weak))
    console.print(Text(NOTE, style="dim"))
    for why, layers in _by_reason(diagnosis.unselected).items():
        console.print(Text(f"not selecting: {join_layers(layers)} ({why})", style="dim"))
    console.print()
    console.print(_policies(diagnosis.policies))
    _print_verdict(console, diagnosis)


def _layers(layers: Sequence[LayerEvidence], weak: Collection[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for column in (
        *("layer", "simi-\nlarity", "query\nmissed", "recall\n(query, dims)", "mass,\nbest"),
        *("worst\nhead", "0.9\nin", "fetched", "KL\nalone"),
    ):
        table.add_column(column, justify="right", no_wrap=True)
    harmful = sorted(layers, key=lambda each: each.harm, reverse=True)[: max(1, len(layers) // 10)]
    for each in layers:
        is_weak = each.layer in weak
        harm = Text(f"{each.harm:.4f}", style="bold" if each in harmful else "")
        table.add_row(*_cells(each, is_weak), harm, style="red" if is_weak else None)
    return table


def _cells(layer: LayerEvidence, is_weak: bool) -> list[str]:
    head, coverage = layer.worst_head
    return [
        f"{'! ' if is_weak else ''}{layer.layer}",
        f"{layer.similarity:.2f}",
        f"{_bare(layer.own_weights)} → {percent(layer.unexplained, 0)}",
        f"{_bare(layer.recall)} ({_bare(layer.recall_true_query)}, "
        f"{_bare(layer.recall_all_dimensions)}) %",
        f"{_bare(layer.coverage, 1)}, {percent(layer.best_coverage, 1)}",
        f"{percent(coverage, 0)} h{head}",
        percent(layer.concentration),
        percent(layer.fetched),
    ]


def _bare(share: float, digits: int = 0) -> str:
    """Per cent without the sign."""
    return percent(share, digits).removesuffix(" %")


def _policies(policies: Mapping[str, PolicyFigures]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("choice of tokens", no_wrap=True)
    for column in (
        *("KL (95 %)", "same\ntop-1", "perplexity\n/ full", "fetched", "with all\nlayers"),
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for name, found in policies.items():
        table.add_row(
            name,
            str(found.kl),
            percent(found.top1_same, 0),
            f"{found.ratio.value:.4f}",
            percent(found.fetched),
            percent(found.fetched_all_layers),
        )
    return table


def _print_verdict(console: Console, diagnosis: Diagnosis) -> None:
    verdict = diagnosis.verdict
    console.print(Text(f"Verdict: {verdict.level}", style=STYLES[verdict.level]))
    for reason in verdict.reasons:
        console.print(_item(reason, console.width))
    if verdict.advice:
        console.print(Text("What would help:", style="bold"))
    for each in verdict.advice:
        console.print(_item(each, console.width))


def _item(words: str, width: int) -> Text:
    """A point of a list, later lines indented."""
    filled = textwrap.fill(words, width, initial_indent="- ", subsequent_indent="  ")
    return Text(filled)


def _by_reason(unselected: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for layer, why in unselected.items():
        found.setdefault(why, []).append(layer)
    return found
