"""What can be read in a picture, and whether it can."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from matplotlib.text import Text

from infinigen_kv_lab.figures.drawing import Canvas


def check_legible(canvas: Canvas) -> None:
    """No text of a finished canvas lies over another or outside."""
    drawn: Any = canvas.figure.canvas
    renderer = drawn.get_renderer()
    width, height = canvas.figure.bbox.size
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts(canvas)]
    assert len(boxes) > 8
    for label, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, label
    for (one, a), (other, b) in combinations(boxes, 2):
        apart = a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0
        assert apart, f"{one!r} lies over {other!r}"


def texts(canvas: Canvas) -> Iterator[Text]:
    """Everything with letters that is to be seen."""
    figure = canvas.figure
    found = [*figure.texts]
    for legend in figure.legends:
        found += [*legend.get_texts(), legend.get_title()]
    visible: list[Any] = [each for each in figure.axes if each.get_visible()]
    for axes in visible:
        found += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            slack = 1e-9 * (high - low)
            # ticks outside the limits exist, but are not drawn
            ticks = [
                tick
                for tick in axis.get_major_ticks()
                if low - slack <= tick.get_loc() <= high + slack
            ]
            found += [label for tick in ticks for label in (tick.label1, tick.label2)]
    yield from (
        each
        for each in found
        if each is not None and each.get_visible() and each.get_text().strip()
    )
