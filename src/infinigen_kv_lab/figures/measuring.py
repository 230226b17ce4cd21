"""Measures what is not there yet, point by point."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from infinigen_kv.files import PointStore, Result, plain
from infinigen_kv_lab.figures.definition import Figure, Setting
from infinigen_kv_lab.figures.point import Point
from infinigen_kv_lab.figures.worklist import Measurements, Within, work_through


class Measurer(Protocol):
    """What measures points: a `Laboratory`."""

    def about(self, point: Point) -> Mapping[str, Any]:
        """What a result depends on beyond the point."""

    def measure(self, point: Point) -> Result:
        """Measure a point."""


Measured = Measurements[Point, Result]


def points_of(figures: Sequence[Figure], setting: Setting) -> list[Point]:
    """Points of several figures, each once."""
    return list(dict.fromkeys(point for figure in figures for point in figure.points(setting)))


def look_up(points: Sequence[Point], laboratory: Measurer, store: PointStore) -> Measured:
    """Only what was measured before."""
    held = {point: store.get(point, laboratory.about(point)) for point in points}
    return Measured({point: result for point, result in held.items() if result is not None})


def measure_points(
    points: Sequence[Point],
    laboratory: Measurer,
    store: PointStore,
    *,
    again: bool,
    cost: Callable[[Point], float],
    say: Callable[[str], None],
) -> Measured:
    """Measure the points that are not in the store, and keep each as soon as it is finished.

    Parameters
    ----------
    again
        Measure those too that are there.
    cost, say
        As in `worklist.work_through`.
    """
    # points of other models are looked up once those are loaded
    known = [] if again else [point for point in points if not point.model]
    measured = look_up(known, laboratory, store)
    todo = [point for point in points if point not in measured.found]
    if len(todo) < len(points):
        say(f"{len(measured.found)} of {len(points)} points were measured before")

    def measure(point: Point, within: Within) -> Result:
        about = laboratory.about(point)  # may load a model
        held = store.get(point, about) if point.model and not again else None
        result = laboratory.measure(point) if held is None else held
        store.put(point, about, result)
        kept: Result = plain(result)
        return kept

    work_through(todo, measured, measure, cost=cost, say=say)
    return measured
