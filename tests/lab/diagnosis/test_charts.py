"""Where values come to lie, and what their shapes are called."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass

import pytest

from infinigen_kv_lab.diagnosis.charts import (
    BOTTOM,
    CELL,
    DOT,
    FILLED,
    GRID,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Series,
    chart,
    heat_map,
)

pytest.importorskip("matplotlib")

INNER = HEIGHT - TOP - BOTTOM
BLUE, RED = "#0072b2", "#d55e00"


@dataclass(frozen=True)
class Drawn:
    """A shape with a title: where its outline lies, and its style."""

    title: str
    left: float
    right: float
    top: float
    bottom: float
    style: dict[str, str]


def write(value: float) -> str:
    return f"{value:.1f}"


def shapes(svg: str) -> list[Drawn]:
    drawn = []
    for group in ET.fromstring(svg).iter("g"):
        title, path = group.find("title"), group.find("path")
        if title is None or path is None:
            continue
        numbers = [float(each) for each in re.findall(r"-?[\d.]+", path.attrib["d"])]
        x, y = numbers[::2], numbers[1::2]
        style = dict(part.split(": ") for part in path.attrib["style"].split("; "))
        drawn.append(Drawn(title.text or "", min(x), max(x), min(y), max(y), style))
    return drawn


def words(svg: str) -> list[str]:
    return [each.text or "" for each in ET.fromstring(svg).iter("text")]


def test_shapes_stand_at_their_layers_and_values() -> None:
    bars = Series("bars", "bar", BLUE, {0: 0.5, 3: 1.0, 2: math.nan})
    dots = Series("dots", "dot", RED, {1: 0.25})
    svg = chart([bars, dots], write, layers=4, name="a name", top=1.0)
    first, last, dot = shapes(svg)
    place = (WIDTH - LEFT - RIGHT) / 4
    for each, layer, value in ((first, 0, 0.5), (last, 3, 1.0)):
        middle = LEFT + (layer + 0.5) * place
        assert each.left == pytest.approx(middle - FILLED * place / 2, abs=1e-3)
        assert each.right == pytest.approx(middle + FILLED * place / 2, abs=1e-3)
        assert each.bottom == pytest.approx(HEIGHT - BOTTOM, abs=1e-3)
        assert each.top == pytest.approx(TOP + (1 - value) * INNER, abs=1e-3)
        assert each.style["fill"] == BLUE
    assert dot.left == dot.right == pytest.approx(LEFT + 1.5 * place, abs=1e-3)
    assert dot.top == dot.bottom == pytest.approx(TOP + 0.75 * INNER, abs=1e-3)
    assert dot.style["stroke-linecap"] == "round" and float(dot.style["stroke-width"]) == DOT
    assert dot.title == "layer 1, dots: 0.2" and dot.style["stroke"] == RED
    assert words(svg)[:4] == ["0", "1", "2", "3"]
    assert [words(svg)[4], words(svg)[-1]] == ["0.0", "1.0"]


def test_it_can_be_read_without_seeing_it_and_takes_the_pages_font() -> None:
    svg = chart([Series("x", "bar", BLUE, {0: 1.0})], write, layers=1, name="a <name>")
    root = ET.fromstring(svg)
    assert root.tag == "svg" and root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == "a <name>"
    assert root.attrib["viewBox"] == f"0 0 {WIDTH} {HEIGHT}"
    for each in root.iter():
        assert "font" not in each.attrib.get("style", "")
        assert not {"id", "href", "clip-path"} & {name.rpartition("}")[2] for name in each.attrib}
        assert each.tag not in ("style", "use", "defs")


def test_values_beyond_the_axis_stay_on_the_chart() -> None:
    series = Series("x", "bar", BLUE, {0: 3.0, 1: -2.0})
    high, low = shapes(chart([series], write, layers=2, name="", top=1.0))
    assert high.top == pytest.approx(TOP, abs=1e-3)
    assert low.top == low.bottom == pytest.approx(HEIGHT - BOTTOM, abs=1e-3)
    assert high.title.endswith("3.0") and low.title.endswith("-2.0")


def test_a_mark_is_a_thin_line_at_the_value() -> None:
    series = Series("x", "mark", BLUE, {0: 0.5})
    (mark,) = shapes(chart([series], write, layers=1, name="", top=1.0))
    assert mark.top == mark.bottom == pytest.approx(TOP + INNER / 2, abs=1e-3)
    assert float(mark.style["stroke-width"]) == 2 and mark.style["fill"] == "none"


def test_many_layers_are_numbered_sparsely() -> None:
    svg = chart([Series("x", "bar", BLUE, {})], write, layers=80, name="")
    numbers = [each for each in words(svg) if "." not in each]
    assert numbers == [str(layer) for layer in range(0, 80, 5)]


@pytest.mark.parametrize("largest", [0.0031, 0.7, 1.0, 95.0])
def test_axes_end_above_all_values(largest: float) -> None:
    series = Series("x", "bar", BLUE, {0: largest, 1: largest / 2})
    high, half = shapes(chart([series], str, layers=2, name=""))
    assert TOP <= high.top < TOP + 0.1 * INNER
    lengths = [each.bottom - each.top for each in (high, half)]
    assert lengths[0] == pytest.approx(2 * lengths[1], abs=1e-2)


def test_heat_map() -> None:
    table = {2: (0.25, 0.9, math.nan), 5: (0.0,)}
    svg = heat_map(table, write, layers=6, what="lost", darkest=0.5, name="")
    cells = shapes(svg)
    depths = [(float(each.style.get("fill-opacity", 1)) - 0.03) / 0.97 for each in cells]
    assert depths == pytest.approx([0.5, 1.0, 0.0, 0.0], abs=1e-3)
    assert cells[1].title == "layer 2, head 1, lost: 0.9"
    place = (WIDTH - LEFT - RIGHT) / 6
    middles = [(each.left + each.right) / 2 for each in cells]
    assert middles == pytest.approx([LEFT + 2.5 * place] * 3 + [LEFT + 5.5 * place], abs=1e-3)
    assert cells[0].right - cells[0].left == pytest.approx(GRID * place, abs=1e-3)
    assert [each.top for each in cells] == pytest.approx([0, CELL, 2 * CELL, 0], abs=1e-3)
    assert [each.bottom - each.top for each in cells] == pytest.approx([CELL - 1] * 4, abs=1e-3)
    assert [each for each in words(svg) if "head" in each] == ["head 0", "head 1", "head 2"]
    assert ET.fromstring(svg).attrib["viewBox"] == f"0 0 {WIDTH} {3 * CELL + BOTTOM}"
