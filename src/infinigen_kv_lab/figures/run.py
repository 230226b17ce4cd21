"""From figures to a folder: measurements, pictures, tables, and the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinigen_kv.errors import InfiniGenError
from infinigen_kv.files import plain, to_json, write_whole
from infinigen_kv_lab.figures.catalogue import figures_of
from infinigen_kv_lab.figures.drawing import Canvas
from infinigen_kv_lab.figures.figure import AnyFigure
from infinigen_kv_lab.figures.machine import machine_facts
from infinigen_kv_lab.figures.page import DrawnFigure, heading, render_page
from infinigen_kv_lab.figures.rig import MeasurementRig
from infinigen_kv_lab.figures.worklist import ShareDone, Work, reason_of, work_through

PAGE = "index.html"

AnyRig = MeasurementRig[Any, Any, Any]
AnyWork = Work[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureOrder:
    """What is wanted, and where it goes.

    Parameters
    ----------
    figures
        To be measured, all of one set; others of the set are drawn too where all that they need
        is there.
    folder
        Of everything that is written; exists and can be written to.
    command
        As it was typed, for the page.
    again
        Measure what is there again.
    """

    figures: Sequence[AnyFigure]
    folder: Path
    command: str
    again: bool = False


@dataclass(slots=True)
class Outcome:
    """Files that were written, by figure, and why others were not."""

    page: Path
    files: dict[str, list[Path]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False


def make_figures(
    order: FigureOrder, setting: Any, rig: AnyRig, say: Callable[[str], None]
) -> Outcome:
    """Measure, draw and write; an interruption stops measuring, what is there is drawn.

    ``setting`` is what the figures of the rig's set take; it has the ``model``'s name.
    """
    work = measure_all(measurements_of(order.figures, setting), rig, say, again=order.again)
    outcome = Outcome(order.folder / PAGE, interrupted=work.interrupted)
    description = rig.describe(setting)
    shown: list[DrawnFigure] = []
    for name, figure in figures_of(rig.figure_set).items():
        part = work if figure in order.figures else _measured_before(figure, setting, rig)
        if part is None:
            continue
        drawn = _draw(figure, setting, part, rig)
        if drawn is None:
            outcome.missing[name] = _why_not(figure, setting, part)
        else:
            shown.append(drawn)
            outcome.files[name] = write_figure(order.folder, drawn, description.facts)
    page = render_page(
        title=f"infinigen-kv: {rig.figure_set} figures of {setting.model}",
        command=order.command,
        warnings=description.warnings,
        groups={"Machine": machine_facts(rig.device), "Settings": description.settings},
        figures=shown,
        missing={heading(name): why for name, why in outcome.missing.items()},
    )
    write_whole(outcome.page, page)
    return outcome


def measurements_of(figures: Iterable[AnyFigure], setting: Any) -> list[Any]:
    """Measurements of several figures, each once."""
    wanted = (each for figure in figures for each in figure.measurements(setting))
    return list(dict.fromkeys(wanted))


def measure_all(
    measurements: Sequence[Any], rig: AnyRig, say: Callable[[str], None], *, again: bool = False
) -> AnyWork:
    """Measure what is not there yet; of what an interruption cut short, as much as there is.

    What cannot be measured, as can be told beforehand, is said first, each reason once.
    """
    work: AnyWork = Work()
    shares: dict[Any, float] = {}
    for each in measurements:
        share, reason = _missing(each, rig)
        if reason is None:
            shares[each] = 1.0 if again else share
            continue
        if reason not in work.failed.values():
            say(f"{each.kind}: cannot be measured: {reason}")
        work.failed[each] = reason
    finished = [each for each, share in shares.items() if not share]
    if finished:
        say(f"{len(finished)} of {len(shares)} points were measured before")
    work.results.update((each, rig.measure(each)) for each in finished)

    def measure(measurement: Any, done: ShareDone) -> Any:
        return rig.measure(measurement, done, again=again)

    todo = {each: each.label for each, share in shares.items() if share}
    work_through(todo, work, measure, cost=lambda each: shares[each] * rig.cost(each), say=say)
    if work.interrupted:
        left = (each for each in todo if each not in work.results and each not in work.failed)
        parts = {each: rig.partial(each) for each in left}
        work.results.update((each, part) for each, part in parts.items() if part is not None)
    return work


def _missing(measurement: Any, rig: AnyRig) -> tuple[float, str | None]:
    """Share that is to be measured, and why it cannot be, if so."""
    try:
        return rig.missing(measurement), None
    except InfiniGenError as error:
        return 1.0, reason_of(error)


def _measured_before(figure: AnyFigure, setting: Any, rig: AnyRig) -> AnyWork | None:
    """What a figure needs, if all of it is there but what cannot be measured."""
    work: AnyWork = Work()
    for each in figure.measurements(setting):
        share, reason = _missing(each, rig)
        if reason is not None:
            work.failed[each] = reason
        elif share:
            return None
        else:
            work.results[each] = rig.measure(each)
    return work if work.results else None


def _draw(figure: AnyFigure, setting: Any, work: AnyWork, rig: AnyRig) -> DrawnFigure | None:
    rows = figure.rows(setting, work.results)
    if not rows:
        return None
    wanted = figure.measurements(setting)
    own = {each: work.results[each] for each in wanted if each in work.results}
    basis = rig.basis(setting, figure, own)
    canvas = Canvas(figure.title, basis.footer)
    figure.draw(canvas, rows)
    remarks = [
        *figure.remarks(setting, rows),
        *basis.remarks,
        *(f"Missing: {each}" for each in _failures(figure, setting, work)),
    ]
    return DrawnFigure(
        name=figure.name,
        title=figure.title,
        about=figure.about,
        remarks=tuple(dict.fromkeys(remarks)),
        rows=tuple(plain(row) for row in rows),
        png=canvas.png(),
    )


def _failures(figure: AnyFigure, setting: Any, work: AnyWork) -> list[str]:
    """What could not be measured, and why; each reason once."""
    by_reason: dict[str, list[Any]] = {}
    for each in figure.measurements(setting):
        if each in work.failed:
            by_reason.setdefault(work.failed[each], []).append(each)
    return [f"{_which(failed)}: {reason}" for reason, failed in by_reason.items()]


def _which(measurements: Sequence[Any]) -> str:
    if len(measurements) == 1:
        return str(measurements[0].label)
    return ", ".join(dict.fromkeys(each.kind for each in measurements))


def _why_not(figure: AnyFigure, setting: Any, work: AnyWork) -> str:
    failures = _failures(figure, setting, work)
    if failures:
        return f"cannot be measured: {'; '.join(failures)}"
    return "its points are not measured yet" if work.interrupted else "nothing to draw"


def write_figure(folder: Path, drawn: DrawnFigure, facts: Mapping[str, Any]) -> list[Path]:
    """The picture, the table, and everything as JSON; ``facts`` are what the numbers depend on."""
    values = {
        "figure": drawn.name,
        "title": drawn.title,
        "about": drawn.about,
        "remarks": drawn.remarks,
        **facts,
        "rows": drawn.rows,
    }
    contents: dict[str, str | bytes] = {
        "png": drawn.png,
        "csv": csv_text(drawn.rows),
        "json": to_json(values),
    }
    paths = [folder / f"{drawn.anchor}.{kind}" for kind in contents]
    for path, data in zip(paths, contents.values(), strict=True):
        write_whole(path, data)
    return paths


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Comma-separated values under the names of the first row's columns."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
