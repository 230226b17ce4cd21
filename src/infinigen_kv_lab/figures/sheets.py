"""What a set of figures leaves in its folder: picture, table and values of each, and the page."""

from __future__ import annotations

import csv
import difflib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from infinigen_kv.errors import InputError
from infinigen_kv.files import to_json, write_whole
from infinigen_kv_lab.figures.page import Sheet

PAGE = "index.html"


FigureT = TypeVar("FigureT")


@dataclass(slots=True)
class Outcome:
    """Files that were written, by figure, and why others were not."""

    page: Path
    files: dict[str, list[Path]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(Generic[FigureT]):
    """What is wanted, and where it goes.

    Parameters
    ----------
    figures
        To be measured; others are drawn too where all their points are there.
    folder
        Of everything that is written; exists and can be written to.
    command
        As it was typed, for the page.
    again
        Measure finished points again.
    """

    figures: Sequence[FigureT]
    folder: Path
    command: str
    again: bool = False


def write_sheets(
    figures: Mapping[str, FigureT],
    draw: Callable[[FigureT], Sheet | str | None],
    outcome: Outcome,
    facts: Mapping[str, Any],
) -> list[Sheet]:
    """Write what can be drawn beside the page, and note in ``outcome`` what cannot.

    Parameters
    ----------
    draw
        Returns a figure's sheet, or why there is none, or None where nobody wants it.
    facts
        As in `write_sheet`.
    """
    sheets = []
    for name, figure in figures.items():
        drawn = draw(figure)
        if isinstance(drawn, Sheet):
            sheets.append(drawn)
            outcome.files[name] = write_sheet(outcome.page.parent, drawn, facts)
        elif drawn is not None:
            outcome.missing[name] = drawn
    return sheets


def write_sheet(folder: Path, sheet: Sheet, facts: Mapping[str, Any]) -> list[Path]:
    """The picture, the table, and everything as JSON; ``facts`` are what the numbers depend on."""
    paths = [folder / f"{sheet.anchor}.{kind}" for kind in ("png", "csv", "json")]
    values = {
        "figure": sheet.name,
        "title": sheet.title,
        "about": sheet.about,
        "remarks": sheet.remarks,
        **facts,
        "rows": sheet.rows,
    }
    contents: tuple[str | bytes, ...] = (sheet.png, csv_text(sheet.rows), to_json(values))
    for path, data in zip(paths, contents, strict=True):
        write_whole(path, data)
    return paths


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Comma-separated values under the names of the first row's columns."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def choose(
    text: str | None,
    known: Mapping[str, FigureT],
    groups: Mapping[str, tuple[str, ...]],
) -> list[FigureT]:
    """What ``--figures 14,16`` names, in the order of ``known``; all of them for None.

    Parameters
    ----------
    known
        Figures by name.
    groups
        Names that stand for several figures.

    Raises
    ------
    InputError
        A name is unknown; lists those that there are.
    """
    if text is None:
        return list(known.values())
    asked = [part.strip().lower() for part in text.split(",") if part.strip()]
    chosen: set[str] = set()
    for name in asked:
        if name not in known and name not in groups:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InputError(f"--figures {name!r} is not valid: {hint}there are {', '.join(known)}")
        chosen.update(groups.get(name, (name,)))
    if not chosen:
        raise InputError(f"--figures {text!r} names none: there are {', '.join(known)}")
    return [figure for name, figure in known.items() if name in chosen]
