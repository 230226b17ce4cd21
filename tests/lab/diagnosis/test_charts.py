"""Where values come to lie."""

from __future__ import annotations

import math

import pytest

from infinigen_kv_lab.diagnosis.charts import (
    BOTTOM,
    CELL,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Series,
    draw,
    heat_map,
    round_up,
)


def write(value: float) -> str:
    return f"{value:.1f}"


def test_shapes_stand_at_their_layers_and_values() -> None:
    values = {0: 0.5, 3: 1.0, 2: math.nan}
    bars = Series("bars", "bar", "blue", values)
    dots = Series("dots", "dot", "red", {1: 0.25})
    chart = draw("t", "a", [bars, dots], layers=4, write=write, top=1.0)
    first, last, dot = chart.shapes
    place = (WIDTH - LEFT - RIGHT) / 4
    inner = HEIGHT - TOP - BOTTOM
    assert first.x + first.width / 2 == pytest.approx(LEFT + place / 2)
    assert last.x + last.width / 2 == pytest.approx(LEFT + 3.5 * place)
    assert (first.y, first.height) == (TOP + inner / 2, inner / 2)
    assert (last.y, last.height) == (TOP, inner)
    assert (dot.x, dot.y) == (LEFT + 1.5 * place, TOP + 0.75 * inner)
    assert dot.title == "layer 1, dots: 0.2" and dot.kind == "dot"
    assert chart.levels[0] == (HEIGHT - BOTTOM, "0.0") and chart.levels[-1] == (TOP, "1.0")
    assert [layer for _, layer in chart.numbers] == [0, 1, 2, 3]
    assert chart.legend == (("blue", "bars"), ("red", "dots"))


def test_values_beyond_the_axis_stay_on_the_chart() -> None:
    series = Series("x", "bar", "blue", {0: 3.0, 1: -2.0})
    high, low = draw("t", "a", [series], layers=2, write=write, top=1.0).shapes
    assert high.y == TOP and low.height == 0
    assert high.title.endswith("3.0")


def test_a_mark_is_a_thin_line_at_the_value() -> None:
    (mark,) = draw(
        "t", "a", [Series("x", "mark", "blue", {0: 0.5})], layers=1, write=write, top=1.0
    ).shapes
    assert mark.y + mark.height / 2 == pytest.approx(TOP + (HEIGHT - TOP - BOTTOM) / 2)


def test_many_layers_are_numbered_sparsely() -> None:
    chart = draw("t", "a", [Series("x", "bar", "blue", {})], layers=80, write=write)
    assert [layer for _, layer in chart.numbers] == list(range(0, 80, 5))
    assert chart.levels[-1][1] == "1.0"


@pytest.mark.parametrize(
    ("value", "top"), [(0.0, 1.0), (0.7, 0.8), (0.8, 0.8), (0.0031, 0.004), (95.0, 100.0), (1, 1)]
)
def test_axes_end_at_round_numbers(value: float, top: float) -> None:
    assert round_up(value) == pytest.approx(top)


def test_heat_map() -> None:
    table = {2: (0.25, 0.9, math.nan), 5: (0.0,)}
    made = heat_map(table, write, layers=6, what="lost", darkest=0.5)
    assert [depth for _, _, depth, _ in made.cells] == [0.5, 1.0, 0.0, 0.0]
    assert made.cells[1][3] == "layer 2, head 1, lost: 0.9"
    middles = [x + made.cell_width / 2 for x, _, _, _ in made.cells]
    place = (WIDTH - LEFT - RIGHT) / 6
    assert middles == pytest.approx([LEFT + 2.5 * place] * 3 + [LEFT + 5.5 * place])
    assert [y for _, y, _, _ in made.cells] == [0, CELL, 2 * CELL, 0]
    assert [head for _, head in made.heads] == [0, 1, 2]
    assert made.height == 3 * CELL + BOTTOM
