"""Works through measurements, one by one, with an estimate of the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from infinigen_kv.errors import InfiniGenError

MeasurementT = TypeVar("MeasurementT", bound=Hashable)
ResultT = TypeVar("ResultT")

ShareDone = Callable[[float], None]
"""Told the share of a measurement that is done, where it takes long."""


def unheeded(share: float) -> None:
    """Takes a share that nobody shows."""


@dataclass(slots=True)
class Work(Generic[MeasurementT, ResultT]):
    """What came out: results, the reasons where there are none, and whether it was cut short."""

    results: dict[MeasurementT, ResultT] = field(default_factory=dict)
    failed: dict[MeasurementT, str] = field(default_factory=dict)
    interrupted: bool = False


def work_through(
    todo: Mapping[MeasurementT, str],
    work: Work[MeasurementT, ResultT],
    measure: Callable[[MeasurementT, ShareDone], ResultT],
    *,
    cost: Callable[[MeasurementT], float],
    say: Callable[[str], None],
) -> None:
    """Put into ``work`` what ``measure`` returns, or why it cannot; Ctrl-C ends it.

    Parameters
    ----------
    todo
        What is to be measured, with labels for lines of progress.
    cost
        Expected time of a measurement in any unit.
    say
        Told about every one in a line, and why one could not be measured; not where a bar on a
        terminal shows the same.
    """
    clock = _Clock([cost(measurement) for measurement in todo])
    try:
        with _progress(len(todo), say) as show:
            for number, (measurement, label) in enumerate(todo.items()):

                def done(share: float, number: int = number, label: str = label) -> None:
                    show(number, label, clock.left(number, share))

                done(0.0)
                try:
                    work.results[measurement] = measure(measurement, done)
                except (InfiniGenError, torch.OutOfMemoryError, MemoryError) as error:
                    work.failed[measurement] = reason_of(error)
                    say(f"{label}: cannot be measured: {work.failed[measurement]}")
                    clock.forget(number)
            show(len(todo), "", "")
    except KeyboardInterrupt:
        work.interrupted = True


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


class _Clock:
    """The time left, from how long the items so far took."""

    def __init__(self, costs: list[float]) -> None:
        self._costs = costs
        self._started = time.monotonic()

    def forget(self, number: int) -> None:
        """It took no time, since it failed."""
        self._costs[number] = 0.0

    def left(self, done: int, share: float = 0.0) -> str:
        """In words, once ``done`` items and a ``share`` of the next one are."""
        worked = sum(self._costs[:done]) + share * sum(self._costs[done : done + 1])
        if not worked:
            return "time left: not known yet"
        elapsed = time.monotonic() - self._started
        return f"about {in_words(elapsed * (sum(self._costs) - worked) / worked)} left"


def in_words(seconds: float) -> str:
    """``50 s``, ``12 min``, ``2 h 05 min``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


@contextmanager
def _progress(total: int, say: Callable[[str], None]) -> Iterator[Callable[[int, str, str], None]]:
    """A bar where stderr is a terminal, else a line for each measurement."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
    from rich.table import Column

    console = Console(stderr=True)
    if not console.is_terminal or total == 0:
        said: set[int] = set()

        def line(done: int, label: str, left: str) -> None:
            if label and done not in said:
                said.add(done)
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
