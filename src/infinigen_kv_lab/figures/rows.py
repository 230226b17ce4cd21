"""Tables: rows of equal columns, and columns that figures share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from infinigen_kv_lab.kit.intervals import Estimate

Row = dict[str, Any]
"""One line of a figure's table; all rows of a figure have the same columns."""


def names(rows: Sequence[Row], column: str = "system") -> list[Any]:
    """Values of a column, each once, in the order of their first rows."""
    return list(dict.fromkeys(row[column] for row in rows))


def series(rows: Sequence[Row], name: str, x: str, y: str) -> tuple[list[float], list[float]]:
    """Columns ``x`` and ``y`` of one system's rows, ordered by ``x``; gaps left out."""
    known = points(rows_with(rows, system=name), x, y)
    return [row[x] for row in known], [row[y] for row in known]


def rows_with(rows: Sequence[Row], **values: Any) -> list[Row]:
    """Those whose columns have these values."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def points(rows: Sequence[Row], x: str, y: str) -> list[Row]:
    """Those that can be drawn at ``x`` and ``y``, ordered by ``x``."""
    known = (row for row in rows if is_number(row[x]) and is_number(row[y]))
    return sorted(known, key=lambda row: row[x])


def is_number(value: float | None) -> bool:
    """Whether a column holds something that can be drawn."""
    return value is not None and math.isfinite(value)


def spread(name: str, estimate: Estimate | None, scale: float = 1.0) -> dict[str, float | None]:
    """Columns of a figure with its interval, times ``scale``."""
    if estimate is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    values = {"": estimate.value, "_low": estimate.low, "_high": estimate.high}
    return {f"{name}{end}": scale * value for end, value in values.items()}


def interval(row: Row, name: str) -> str:
    """The interval of a column of `spread` in words, to follow it; empty where there is none."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    if low is None or high is None or not math.isfinite(low + high):
        return ""
    return f" ({low:.3f} to {high:.3f})"
