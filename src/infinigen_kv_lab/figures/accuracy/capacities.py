"""Table 2: a limited home, by capacity and by what makes room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from infinigen_kv.storage.config import StorageConfig
from infinigen_kv.storage.homes.slots import Eviction
from infinigen_kv_lab.evals.perplexity import Perplexity
from infinigen_kv_lab.figures.accuracy.definition import (
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

TEXT = "wikitext2"
POLICY = "infinigen"
EVICTIONS: tuple[Eviction, ...] = ("counter", "lru", "fifo")
NAMES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "counter": ("counter", "infinigen"),
        "lru": ("least recently used", "scissorhands"),
        "fifo": ("first in, first out", "h2o"),
    }
)
PAPER_FULL, PAPER_FIFO = 11.68, 19.64  # OPT-6.7B on WikiText-2, the latter at 80 % (Table 2)


class Capacities(AccuracyFigure):
    name = "table-2"
    title = "A limited home: perplexity by capacity and eviction"
    about = (
        "The home holds a share of prompt and decoded tokens; what exceeds it is evicted for good; "
        "layers that are kept on the device whole have no such limit. "
        "Perplexity over that of the full cache, paired by window, with intervals. On the right "
        "the share of the wanted tokens that had been evicted by then. The paper has 80 % only, "
        "for OPT-6.7B."
    )

    def trials(self, setting: AccuracySetting) -> list[Trial]:
        return [trial for _, _, trial in self._made(setting)]

    @staticmethod
    def _made(setting: AccuracySetting) -> list[tuple[float, Eviction, Trial]]:
        span = setting.scale.stepwise
        return [
            (
                capacity,
                evict,
                setting.reading(
                    TEXT, (POLICY,), span, storage=StorageConfig(capacity=capacity, evict=evict)
                ),
            )
            for capacity in setting.scale.capacities
            for evict in (EVICTIONS if capacity < 1 else EVICTIONS[:1])  # nothing is evicted
        ]

    def rows(self, setting: AccuracySetting, found: Found) -> list[Row]:
        rows: list[Row] = []
        for capacity, evict, trial in self._made(setting):
            for result in results_of(found, trial, Perplexity).values():
                shown: Sequence[str] = (evict,) if capacity < 1 else EVICTIONS
                rows += [
                    {
                        "system": name,
                        "capacity_percent": 100 * capacity,
                        **spread("perplexity", result.ppl),
                        **spread("perplexity_full", result.ppl_full),
                        **spread("ratio", result.ratio),
                        "kl": result.kl.value,
                        **spread("missed_percent", result.costs.missed_share, 100),
                        "windows": result.windows,
                    }
                    for name in shown
                ]
        return sorted(rows, key=lambda row: EVICTIONS.index(row["system"]))

    def remarks(self, setting: AccuracySetting, rows: Sequence[Row]) -> list[str]:
        said = []
        for capacity in sorted({row["capacity_percent"] for row in rows}, reverse=True):
            parts = [
                f"{NAMES[row['system']][0]} {row['ratio']:.3f}{interval(row, 'ratio')}"
                for row in rows
                if row["capacity_percent"] == capacity
            ]
            said.append(
                f"At {capacity:g} %, times the full cache's perplexity: {', '.join(parts)}."
            )
        return said

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        from infinigen_kv_lab.figures.accuracy.drawing import curve
        from infinigen_kv_lab.figures.drawing import PAPER, name_axes, plain_log

        ratios, misses = canvas.panels(1, 2)[0]
        for name in names(rows):
            label, look = NAMES[name]
            mine = [row for row in rows if row["system"] == name]
            for axes, y in ((ratios, "ratio"), (misses, "missed_percent")):
                curve(canvas, axes, mine, "capacity_percent", y, look=look, label=label)
        paper = PAPER_FIFO / PAPER_FULL
        ratios.plot(
            [74, 86],
            [paper, paper],
            color=PAPER,
            linestyle=(0, (3, 1.5)),
            linewidth=1.8,
            label=f"the paper's FIFO at 80 %: {paper:.2f} x",
        )
        ratios.set_yscale("log")
        ratios.margins(y=0.08)
        plain_log(ratios.yaxis)
        for axes in (ratios, misses):
            axes.set_xlim(0, 105)
        misses.set_ylim(bottom=0)
        name_axes(ratios, "capacity (% of all tokens)", "perplexity over the full cache's")
        name_axes(misses, "capacity (% of all tokens)", "wanted tokens that were evicted (%)")
        canvas.legend(ratios, misses)
