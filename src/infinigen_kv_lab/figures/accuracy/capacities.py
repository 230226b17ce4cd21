"""Table 2: a limited home, by capacity and by what makes room."""

from __future__ import annotations

from collections.abc import Sequence

from infinigen_kv.storage.config import StorageConfig
from infinigen_kv.storage.homes.slots import Eviction
from infinigen_kv_lab.evals.perplexity import Perplexity
from infinigen_kv_lab.figures.accuracy.figure import AccuracyFigure, Cases, Results, results_of
from infinigen_kv_lab.figures.accuracy.setting import TEXT, AccuracySetting
from infinigen_kv_lab.figures.drawing import Canvas, log_axes, name_axes
from infinigen_kv_lab.figures.rows import Row, interval, names, rows_with, spread
from infinigen_kv_lab.figures.styles import PAPER

POLICY = "infinigen"
EVICTIONS: tuple[Eviction, ...] = ("counter", "lru", "fifo")
NAMES = {
    "counter": ("counter", "infinigen"),
    "lru": ("least recently used", "scissorhands"),
    "fifo": ("first in, first out", "h2o"),
}
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

    def cases(self, setting: AccuracySetting) -> Cases:
        span = setting.scale.stepwise
        return [
            (
                {"capacity_percent": 100 * capacity},
                setting.reading(
                    TEXT, (POLICY,), span, storage=StorageConfig(capacity=capacity, evict=evict)
                ),
            )
            for capacity in setting.scale.capacities
            for evict in (EVICTIONS if capacity < 1 else EVICTIONS[:1])  # nothing is evicted
        ]

    def rows(self, setting: AccuracySetting, results: Results) -> list[Row]:
        rows: list[Row] = []
        for columns, measurement in self.cases(setting):
            storage = measurement.storage
            limited = storage.capacity is not None and storage.capacity < 1
            for found in results_of(results.get(measurement, {}), Perplexity).values():
                rows += [
                    {
                        "system": name,
                        **columns,
                        **spread("perplexity", found.ppl),
                        **spread("perplexity_full", found.ppl_full),
                        **spread("ratio", found.ratio),
                        "kl": found.kl.value,
                        **spread("missed_percent", found.costs.missed_share, 100),
                        "windows": found.windows,
                    }
                    for name in ((storage.evict,) if limited else EVICTIONS)
                ]
        return sorted(rows, key=lambda row: EVICTIONS.index(row["system"]))

    def remarks(self, setting: AccuracySetting, rows: Sequence[Row]) -> list[str]:
        said = []
        for capacity in sorted(names(rows, "capacity_percent"), reverse=True):
            parts = [
                f"{NAMES[row['system']][0]} {row['ratio']:.3f}{interval(row, 'ratio')}"
                for row in rows_with(rows, capacity_percent=capacity)
            ]
            said.append(
                f"At {capacity:g} %, times the full cache's perplexity: {', '.join(parts)}."
            )
        return said

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        ratios, misses = canvas.panels(1, 2)[0]
        for axes, y in ((ratios, "ratio"), (misses, "missed_percent")):
            canvas.curves(axes, rows, "capacity_percent", y, looks=NAMES)
        paper = PAPER_FIFO / PAPER_FULL
        ratios.plot(
            [74, 86],
            [paper, paper],
            color=PAPER,
            linestyle=(0, (3, 1.5)),
            linewidth=1.8,
            label=f"the paper's FIFO at 80 %: {paper:.2f} x",
        )
        log_axes(ratios, "y", margin=0.08)
        for axes in (ratios, misses):
            axes.set_xlim(0, 105)
        misses.set_ylim(bottom=0)
        name_axes(ratios, "capacity (% of all tokens)", "perplexity over the full cache's")
        name_axes(misses, "capacity (% of all tokens)", "wanted tokens that were evicted (%)")
        canvas.legend(ratios, misses)
