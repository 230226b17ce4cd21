"""Charts by layer, as SVG that stands in a page: each value says on demand what it is.

Drawn by matplotlib; its text stays text and gets the page's font, each value's shape a title.
"""

from __future__ import annotations

import io
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infinigen_kv_lab.figures.styles import RED

WIDTH, HEIGHT = 840, 170  # of a chart's view box
LEFT, RIGHT, TOP, BOTTOM = 52, 6, 8, 22  # margins
TICKS = 16  # numbers of layers and heads at most
FILLED = 0.72  # share of a layer's place that its bars take
GRID = 0.94  # and its cells
CELL = 13  # height of a cell
DOT = 7.0  # across
TITLED = "layer "  # what titles start with
TEXT_COLOUR = "#444444"

Write = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One measure: values by layer, how they are drawn and what they are called.

    A ``mark`` is a line across the layer's place. Values that are not finite are left out.
    """

    label: str
    shape: Literal["bar", "mark", "dot"]
    color: str
    values: Mapping[int, float]


def chart(
    series: Sequence[Series], write: Write, *, layers: int, name: str, top: float | None = None
) -> str:
    """SVG of a chart over all layers of the model.

    Parameters
    ----------
    write
        A value in words.
    layers
        L: each has a place, whether it has values or not.
    name
        For those who cannot see it.
    top
        Upper end of the axis, which starts at 0; None for one above all values.
    """
    from matplotlib.ticker import MaxNLocator

    axes = _axes(HEIGHT, layers)
    known = [value for each in series for value in each.values.values() if math.isfinite(value)]
    high = top or 1.05 * max(known, default=0.0) or 1.0
    axes.set_ylim(0, high)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 2.5, 5, 10)))
    axes.yaxis.set_major_formatter(lambda value, _: write(value))
    axes.grid(axis="y", color="#dddddd", linewidth=1)
    for each in series:
        for layer, value in each.values.items():
            if math.isfinite(value):
                title = f"{TITLED}{layer}, {each.label}: {write(value)}"
                _draw(axes, each, layer, min(max(value, 0.0), high), title)
    return _svg(axes.figure, name)


def heat_map(
    table: Mapping[int, Sequence[float]],
    write: Write,
    *,
    layers: int,
    what: str,
    darkest: float,
    name: str,
) -> str:
    """SVG of values by layer (across) and head (down).

    Those of ``darkest`` and above are the darkest; ``layers`` is L, all of the model's.
    """
    from matplotlib.colors import to_rgba
    from matplotlib.ticker import MaxNLocator

    heads = max((len(values) for values in table.values()), default=0)
    axes = _axes(CELL * heads + BOTTOM, layers, top=0)
    axes.set_ylim(max(heads, 1) - 0.5, -0.5)
    axes.yaxis.set_major_locator(MaxNLocator(TICKS, integer=True))
    axes.yaxis.set_major_formatter("head {x:.0f}")
    for layer, values in table.items():
        for head, value in enumerate(values):
            depth = 0.0 if math.isnan(value) else min(1.0, max(0.0, value / darkest))
            (cell,) = axes.bar(layer, (CELL - 1) / CELL, GRID, head - 0.5)
            cell.set_facecolor(to_rgba(RED, 0.03 + 0.97 * depth))
            cell.set_gid(f"{TITLED}{layer}, head {head}, {what}: {write(value)}")
    return _svg(axes.figure, name)


def _axes(height: int, layers: int, top: int = TOP) -> Any:
    """Axes whose figure has a point for each unit of the view box; no line around them."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
    box = (WIDTH - LEFT - RIGHT, height - top - BOTTOM)
    axes = figure.add_axes(
        (LEFT / WIDTH, BOTTOM / height, box[0] / WIDTH, max(1, box[1]) / height), autoscale_on=False
    )
    axes.set_xlim(-0.5, layers - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(TICKS, integer=True))
    axes.tick_params(length=0, labelsize=11, labelcolor=TEXT_COLOUR)
    axes.spines[:].set_visible(False)
    axes.set_axisbelow(True)
    return axes


def _draw(axes: Any, series: Series, layer: int, value: float, title: str) -> None:
    """One value's shape; its group carries the title until `_svg` makes one of it."""
    ends = (layer - FILLED / 2, layer + FILLED / 2)
    if series.shape == "bar":
        (bar,) = axes.bar(layer, value, FILLED, color=series.color)
        bar.set_gid(title)
    elif series.shape == "mark":
        axes.plot(ends, (value, value), series.color, linewidth=2, solid_capstyle="butt", gid=title)
    else:  # the cap at both ends of a line of no length
        place = FILLED * (WIDTH - LEFT - RIGHT) / (axes.get_xlim()[1] + 0.5)
        dot = {"linewidth": min(place, DOT), "solid_capstyle": "round", "gid": title}
        axes.plot((layer, layer), (value, value), series.color, **dot)


def _svg(figure: Any, name: str) -> str:
    """The figure as an element of a page: no names that others have, no font, nothing linked."""
    import matplotlib

    for axes in figure.axes:
        for artist in axes.get_children():
            artist.set_clip_on(False)
        for line in axes.get_ygridlines():
            line.set_clip_on(False)
    buffer = io.StringIO()
    about = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=about)
    root = ET.fromstring(buffer.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        title = element.attrib.pop("id", "")
        if title.startswith(TITLED):
            ET.SubElement(element, "title").text = title
        if element.tag == "text":
            style = element.attrib["style"].split("; ")
            element.set("style", "; ".join(each for each in style if not each.startswith("font")))
    for definitions in root.findall("defs"):  # styles for the whole page
        root.remove(definitions)
    size = ("width", "height", "version")
    root.attrib = {key: value for key, value in root.attrib.items() if key not in size}
    root.attrib |= {"role": "img", "aria-label": name, "font-size": "11"}
    root.set("font-family", "system-ui, sans-serif")
    return ET.tostring(root, encoding="unicode")
