"""Parts of pictures that accuracy figures share: lines with intervals, and maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from infinigen_kv_lab.evals.reading import FULL
from infinigen_kv_lab.figures.definition import Row
from infinigen_kv_lab.figures.drawing import Canvas

COLOURS = "cividis"  # even and distinct to every kind of colour vision
FULL_LABEL = "full cache"


def curve(
    canvas: Canvas,
    axes: Any,
    rows: Sequence[Row],
    x: str,
    y: str,
    *,
    look: str,
    label: str | None = "",
    joined: bool = True,
) -> None:
    """A line through column ``y`` of some rows, with intervals from ``y_low`` and ``y_high``.

    Parameters
    ----------
    look
        System whose look the line has (`Canvas.style`).
    label
        Of the legend: empty for ``look``, None for none.
    joined
        Whether a line joins the dots.
    """
    known = sorted(
        (row for row in rows if is_number(row[x]) and is_number(row[y])), key=lambda row: row[x]
    )
    if not known:
        return
    xs, ys = [row[x] for row in known], [row[y] for row in known]
    canvas.line(axes, look, xs, ys, label)
    if not joined:
        axes.lines[-1].set_linestyle("")
    style = canvas.style(look)
    for row in known:
        ends = [row.get(f"{y}_low"), row.get(f"{y}_high")]
        if all(is_number(each) for each in ends):
            axes.plot([row[x]] * 2, ends, color=style["color"], linewidth=1.1, zorder=1.9)


def full_line(canvas: Canvas, axes: Any, row: Row, y: str) -> None:
    """The full cache's value in column ``y`` as a line across, with its interval as a band."""
    color = canvas.style(FULL)["color"]
    axes.axhline(row[y], color=color, linestyle="--", linewidth=1.2, label=FULL_LABEL)
    ends = [row[f"{y}_low"], row[f"{y}_high"]]
    if all(is_number(each) for each in ends):
        axes.axhspan(*ends, color=color, alpha=0.08, linewidth=0)


def is_number(value: float | None) -> bool:
    """Whether a column holds something that can be drawn."""
    return value is not None and math.isfinite(value)


def heat_map(
    axes: Any,
    values: Sequence[Sequence[float | None]],
    x: Sequence[str],
    y: Sequence[str],
    *,
    low: float = 0.0,
    high: float = 1.0,
    cells: Sequence[Sequence[str]] | None = None,
) -> Any:
    """Rows of values as a map, the first row on top; gaps stay white. Returns its image.

    Parameters
    ----------
    x, y
        Labels of the columns and rows; an empty one is not written.
    cells
        What to write into each field.
    """
    numbers = [[math.nan if value is None else value for value in row] for row in values]
    axes.grid(visible=False)
    image = axes.imshow(numbers, cmap=COLOURS, vmin=low, vmax=high, aspect="auto")
    for axis, labels in ((axes.xaxis, x), (axes.yaxis, y)):
        places = [place for place, label in enumerate(labels) if label]
        axis.set_ticks(places, [labels[place] for place in places])
    for row, texts in enumerate(cells or ()):
        for column, text in enumerate(texts):
            dark = numbers[row][column] < (low + high) / 2
            axes.text(
                column,
                row,
                text,
                ha="center",
                va="center",
                fontsize=8,
                color="white" if dark else "black",
            )
    return image


def colour_bar(canvas: Canvas, image: Any, axes: Any, label: str) -> None:
    """The scale of a map, beside ``axes``."""
    bar = canvas.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
    bar.ax.tick_params(labelsize=8)
    bar.set_label(label, fontsize=9)
