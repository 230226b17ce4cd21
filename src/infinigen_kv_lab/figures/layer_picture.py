"""Picture of a comparison: what is fetched, and what is found of what matters, by layer."""

from __future__ import annotations

from pathlib import Path

from infinigen_kv.files import write_whole
from infinigen_kv_lab.bench.comparison import FULL, Comparison
from infinigen_kv_lab.figures.drawing import Canvas, name_axes, whole_numbers

LOOKS = ("h2o", "infinigen", "quest", "streaming-llm")  # systems whose looks the lines have


def plot_layers(comparison: Comparison, path: Path, *, title: str) -> None:
    """Write a PNG of fetched share and recall by layer, one line per system but the full cache.

    Raises
    ------
    InputError
        If matplotlib is missing.
    OSError
        If the file cannot be written; nothing half-written remains.
    """
    canvas = Canvas(title, "layer 0 is attended to in full")
    shares, recalls = canvas.panels(2, 1, height=6.5, sharex=True)[:, 0]
    systems = [system for system in comparison.systems if system.name != FULL]
    for system, look in zip(systems, LOOKS, strict=False):
        recall = system.recall_by_layer
        label = (
            f"{system.name}: {100 * system.fetched_share:.1f} % fetched, "
            f"recall {100 * system.recall_mean:.0f} %"
        )
        rows = [
            {
                "layer": layer,
                "fetched": 100 * system.fetched_by_layer[layer],
                "recall": 100 * recall[layer] if layer in recall else None,
            }
            for layer in recall or system.fetched_by_layer
        ]
        for axes, column in ((shares, "fetched"), (recalls, "recall")):
            canvas.curve(axes, rows, "layer", column, look=look, label=label)
    shares.set_ylim(bottom=0)
    recalls.set_ylim(0, 100)
    whole_numbers(recalls)
    name_axes(shares, "", "fetched share of the cache (%)")
    name_axes(recalls, "layer", "recall of the tokens that matter (%)")
    canvas.legend(shares, recalls, columns=2)
    write_whole(path, canvas.png())
