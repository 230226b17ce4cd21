"""Results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer


def say(text: str) -> None:
    """One line on stderr."""
    typer.echo(text, err=True)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Say on stderr what takes a while; on a terminal with a spinner that leaves nothing behind."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        say(text)
        yield
        return
    with console.status(text):
        yield


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout: the first column to the left, numbers to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120, color_system=None)
    typer.echo(title)  # apart from the table, within which it would wrap
    made = Table(box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", no_wrap=index == 0)
    for row in rows:
        made.add_row(*row)
    console.print(made, markup=False)


def percent(share: float, digits: int = 1) -> str:
    """A share as per cent; a dash for NaN."""
    return "-" if math.isnan(share) else f"{share:.{digits}%}".replace("%", " %")


def json_text(values: Any, *, indent: int | None = None) -> str:
    """Strict JSON: numbers that it has no word for become null."""
    return json.dumps(_plain(values), allow_nan=False, ensure_ascii=False, indent=indent)


def print_json(values: Any) -> None:
    """One line on stdout."""
    typer.echo(json_text(values))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
