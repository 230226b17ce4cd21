"""Charts by layer as plain shapes, which the page's template draws as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 840, 170
LEFT, RIGHT, TOP, BOTTOM = 52, 6, 8, 22  # margins
LABELLED = 16  # layer numbers under a chart, about
FILLED = 0.72  # share of a layer's place that its bars take
GRID = 0.94  # and its cells
CELL = 13  # height of a cell

Write = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One measure: values by layer, how they are drawn and what they are called.

    ``shape`` is ``bar``, ``mark`` (a line across the layer's place) or ``dot``; ``style`` one of
    the template's colours.
    """

    label: str
    shape: str
    style: str
    values: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Shape:
    """A rectangle, or a dot of which ``x`` and ``y`` are the middle; ``title`` is shown on it."""

    kind: str
    style: str
    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """What the template needs of one chart, in units of its view box."""

    title: str
    about: str
    legend: tuple[tuple[str, str], ...]
    shapes: tuple[Shape, ...]
    levels: tuple[tuple[float, str], ...]
    """Heights and labels of the horizontal lines."""
    numbers: tuple[tuple[float, int], ...]
    """Places of the layer numbers."""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT


def draw(
    title: str,
    about: str,
    series: Sequence[Series],
    *,
    layers: int,
    write: Write,
    top: float | None = None,
) -> Chart:
    """A chart over all layers of the model.

    Parameters
    ----------
    layers
        L: each has a place, whether it has values or not.
    write
        A value in words.
    top
        Upper end of the axis, which starts at 0; None for a round number above all values.
    """
    known = [value for each in series for value in each.values.values() if math.isfinite(value)]
    high = top or round_up(max(known, default=1.0))
    scale = _Scale(layers, high)
    shapes = [shape for each in series for shape in scale.shapes(each, write)]
    return Chart(
        title=title,
        about=about,
        legend=tuple((each.style, each.label) for each in series),
        shapes=tuple(shapes),
        levels=tuple((scale.y(high * at / 4), write(high * at / 4)) for at in range(5)),
        numbers=scale.numbers(),
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    layers: int
    high: float

    @property
    def place(self) -> float:
        return (WIDTH - LEFT - RIGHT) / self.layers

    def middle(self, layer: int) -> float:
        return LEFT + (layer + 0.5) * self.place

    def numbers(self) -> tuple[tuple[float, int], ...]:
        every = max(1, math.ceil(self.layers / LABELLED))
        return tuple((self.middle(layer), layer) for layer in range(0, self.layers, every))

    def y(self, value: float) -> float:
        inside = min(max(value, 0.0), self.high) / self.high
        return TOP + (1 - inside) * (HEIGHT - TOP - BOTTOM)

    def shapes(self, series: Series, write: Write) -> Iterable[Shape]:
        width = FILLED * self.place
        for layer, value in series.values.items():
            if not math.isfinite(value):
                continue
            y = self.y(value)
            x, height = self.middle(layer) - width / 2, HEIGHT - BOTTOM - y
            if series.shape == "mark":
                y, height = y - 1, 2.0
            elif series.shape == "dot":
                x, width, height = self.middle(layer), min(width, 7.0), min(width, 7.0)
            title = f"layer {layer}, {series.label}: {write(value)}"
            yield Shape(series.shape, series.style, x, y, width, height, title)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Cells by head (down) and layer (across, as in a `Chart`), in units of the view box."""

    cells: tuple[tuple[float, float, float, str], ...]
    """Left and upper ends, depth in [0, 1] and title of each."""
    cell_width: float
    heads: tuple[tuple[float, int], ...]
    """Places of the heads' numbers."""
    numbers: tuple[tuple[float, int], ...]
    """Places of the layers' numbers."""
    height: float
    width: int = WIDTH
    left: int = LEFT
    cell_height: int = CELL


def heat_map(
    table: Mapping[int, Sequence[float]], write: Write, *, layers: int, what: str, darkest: float
) -> HeatMap:
    """Values by layer and head; those of ``darkest`` and above are the darkest.

    ``layers`` is L, all of the model's.
    """
    scale = _Scale(layers, 1.0)
    cells = []
    for layer, values in table.items():
        for head, value in enumerate(values):
            depth = 0.0 if math.isnan(value) else min(1.0, max(0.0, value / darkest))
            title = f"layer {layer}, head {head}, {what}: {write(value)}"
            x = scale.middle(layer) - GRID * scale.place / 2
            cells.append((x, float(CELL * head), depth, title))
    heads = max((len(values) for values in table.values()), default=0)
    every = max(1, math.ceil(heads / LABELLED))
    return HeatMap(
        cells=tuple(cells),
        cell_width=GRID * scale.place,
        heads=tuple((CELL * (head + 0.75), head) for head in range(0, heads, every)),
        numbers=scale.numbers(),
        height=CELL * heads + BOTTOM,
    )


def round_up(value: float) -> float:
    """The next of 1, 2, 4 and 8 times a power of ten; 1 for 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10, 20) if step * power >= value)
