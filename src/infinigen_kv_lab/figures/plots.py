"""Pictures of a comparison."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinigen_kv.errors import InputError
from infinigen_kv_lab.bench.comparison import FULL, Comparison

# Okabe and Ito's colours, distinct to every kind of colour vision; markers and dashes tell the
# lines apart in grey too.
STYLES = (
    {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    {"color": "#009E73", "marker": "^", "linestyle": ":"},
    {"color": "#CC79A7", "marker": "D", "linestyle": "-."},
)


def require_matplotlib() -> None:
    """Raise `InputError` where matplotlib is missing, before work is done for a plot."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InputError("the plot needs matplotlib: pip install 'infinigen-kv[plot]'") from error


def plot_layers(comparison: Comparison, path: Path, *, title: str) -> None:
    """Write a PNG of fetched share and recall by layer, one line per system but the full cache.

    Raises
    ------
    InputError
        If matplotlib is missing.
    OSError
        If the file cannot be written; nothing half-written remains.
    """
    require_matplotlib()
    # A figure of its own, without pyplot: no display, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True)
    systems = [system for system in comparison.systems if system.name != FULL]
    for system, style in zip(systems, STYLES, strict=False):
        recall = system.recall_by_layer
        fetched = {
            layer: system.fetched_by_layer[layer] for layer in recall or system.fetched_by_layer
        }
        _line(top, fetched, f"{system.name} (mean {100 * system.fetched_share:.1f} %)", style)
        _line(bottom, recall, f"{system.name} (mean {100 * system.recall_mean:.0f} %)", style)
    _dress(top, "fetched share of the cache (%)")
    top.set_ylim(bottom=0)
    _dress(bottom, "recall of the tokens that matter (%)")
    bottom.set_ylim(0, 100)
    bottom.set_xlabel("layer (layer 0 is attended to in full)")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title)
    _save(figure, path)


def _line(axes: Any, by_layer: Mapping[int, float], label: str, style: Mapping[str, str]) -> None:
    layers = sorted(by_layer)
    shares = [100 * by_layer[layer] for layer in layers]
    axes.plot(layers, shares, label=label, markersize=4, linewidth=1.4, **style)


def _dress(axes: Any, label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    # above the lines, which may run anywhere
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderpad=0)


def _save(figure: Any, path: Path) -> None:
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".png")
    os.close(handle)
    try:
        figure.savefig(scratch)
        Path(scratch).chmod(0o644)
        Path(scratch).replace(path)
    finally:
        Path(scratch).unlink(missing_ok=True)
