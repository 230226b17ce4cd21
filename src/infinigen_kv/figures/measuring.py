"""Measures what is not there yet, point by point, with an estimate of the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from infinigen_kv.errors import InfiniGenError
from infinigen_kv.figures.definition import Figure, Setting
from infinigen_kv.figures.point import Point
from infinigen_kv.figures.store import PointStore, Result, plain


class Measurer(Protocol):
    """What measures points: a `Laboratory`."""

    def about(self, point: Point) -> Mapping[str, Any]:
        """What a result depends on beyond the point."""

    def measure(self, point: Point) -> Result:
        """Measure a point."""


@dataclass(slots=True)
class Measured:
    """What came out: results, the reasons where there are none, and whether it was cut short."""

    found: dict[Point, Result] = field(default_factory=dict)
    failed: dict[Point, str] = field(default_factory=dict)
    interrupted: bool = False


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
    cost
        Expected time of a point in any unit.
    say
        Told about every point in a line, and why one could not be measured; not where a bar on a
        terminal shows the same.
    """
    # points of other models are looked up once those are loaded
    known = [] if again else [point for point in points if not point.model]
    measured = look_up(known, laboratory, store)
    todo = [point for point in points if point not in measured.found]
    if len(todo) < len(points):
        say(f"{len(measured.found)} of {len(points)} points were measured before")
    clock = _Clock([cost(point) for point in todo])
    try:
        with _progress(len(todo), say) as show:
            for number, point in enumerate(todo):
                show(number, point.label, clock.left(number))
                _measure(point, laboratory, store, measured, again=again, say=say)
                if point in measured.failed:
                    clock.forget(number)
            show(len(todo), "", "")
    except KeyboardInterrupt:
        measured.interrupted = True
    return measured


def _measure(
    point: Point,
    laboratory: Measurer,
    store: PointStore,
    measured: Measured,
    *,
    again: bool,
    say: Callable[[str], None],
) -> None:
    try:
        about = laboratory.about(point)  # may load a model
        held = store.get(point, about) if point.model and not again else None
        result = laboratory.measure(point) if held is None else held
    except (InfiniGenError, torch.OutOfMemoryError, MemoryError) as error:
        measured.failed[point] = " ".join(str(error).split()) or type(error).__name__
        say(f"{point.label}: cannot be measured: {measured.failed[point]}")
        return
    store.put(point, about, result)
    measured.found[point] = plain(result)


class _Clock:
    """The time left, from how long the points so far took."""

    def __init__(self, costs: list[float]) -> None:
        self._costs = costs
        self._started = time.monotonic()

    def forget(self, number: int) -> None:
        """A point took no time, since it failed."""
        self._costs[number] = 0.0

    def left(self, done: int) -> str:
        """In words, once ``done`` points are."""
        if not sum(self._costs[:done]):
            return "time left: not known yet"
        elapsed = time.monotonic() - self._started
        seconds = elapsed * sum(self._costs[done:]) / sum(self._costs[:done])
        return f"about {in_words(seconds)} left"


def in_words(seconds: float) -> str:
    """``50 s``, ``12 min``, ``2 h 05 min``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


@contextmanager
def _progress(total: int, say: Callable[[str], None]) -> Iterator[Callable[[int, str, str], None]]:
    """A bar where stderr is a terminal, else a line for each point."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
    from rich.table import Column

    console = Console(stderr=True)
    if not console.is_terminal or total == 0:

        def line(done: int, label: str, left: str) -> None:
            if label:
                say(f"[{done + 1}/{total}] {label} ({left}) ...")

        yield line
        return
    columns = (
        SpinnerColumn(),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True), markup=False),
        TextColumn(
            "{task.description}",
            table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            markup=False,
        ),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        task = progress.add_task("", total=total, left="")

        def bar(done: int, label: str, left: str) -> None:
            progress.update(task, completed=done, description=label, left=left)

        yield bar
