"""One HTML page with all figures: pictures embedded, nothing fetched from elsewhere."""

from __future__ import annotations

import base64
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinigen_kv.errors import InputError

TEMPLATE = Path(__file__).with_name("page.html")
TABLE = "table-"


@dataclass(frozen=True, slots=True)
class DrawnFigure:
    """One figure of a page.

    Parameters
    ----------
    name, title
        ``14`` and what it shows.
    about
        How to read it.
    remarks
        Sentences about this run.
    rows
        The table; all rows have the same columns.
    png
        The picture.
    """

    name: str
    title: str
    about: str
    remarks: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]
    png: bytes

    @property
    def heading(self) -> str:
        """``Figure 14``, ``Table 1``; figures of our own go by their name."""
        return heading(self.name)

    @property
    def anchor(self) -> str:
        """For links within the page."""
        return re.sub(r"[^A-Za-z0-9]+", "-", self.heading.lower())


def heading(name: str) -> str:
    """What a figure or, by the name ``table-1``, a table is called."""
    return f"Table {name.removeprefix(TABLE)}" if name.startswith(TABLE) else f"Figure {name}"


def require_jinja2() -> None:
    """Raise `InputError` where jinja2 is missing, before work is done for a page."""
    if importlib.util.find_spec("jinja2") is None:
        raise InputError("the page needs jinja2: pip install 'infinigen-kv[plot]'")


def render_page(
    *,
    title: str,
    command: str,
    warnings: Sequence[str],
    groups: Mapping[str, Mapping[str, str]],
    figures: Sequence[DrawnFigure],
    missing: Mapping[str, str],
) -> str:
    """The page as HTML; all text in it is escaped.

    Parameters
    ----------
    command
        What was typed.
    warnings
        What must be known before a number is read.
    groups
        Facts under headings: machine, settings.
    missing
        Figures that could not be drawn, and why.

    Raises
    ------
    InputError
        If jinja2 is missing.
    """
    require_jinja2()
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=title,
        command=command,
        warnings=warnings,
        groups=groups,
        figures=[_shown(figure) for figure in figures],
        missing=missing,
    )


def _shown(figure: DrawnFigure) -> dict[str, Any]:
    columns = list(figure.rows[0]) if figure.rows else []
    return {
        "heading": figure.heading,
        "anchor": figure.anchor,
        "title": figure.title,
        "about": figure.about,
        "remarks": figure.remarks,
        "picture": base64.b64encode(figure.png).decode("ascii"),
        "columns": columns,
        "rows": [[_cell(row[column]) for column in columns] for row in figure.rows],
    }


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
