"""What ``infinigen-kv eval`` prints: a table per task, and one of the mean over tasks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from infinigen_kv.cli.output import table
from infinigen_kv_lab.cli.sweep import EVERYTHING, home_label

if TYPE_CHECKING:
    from infinigen_kv_lab.evals.run import Point

KIB = 1024
INTERVAL = re.compile(r" \[[^]]*\]")


def distinct(points: Sequence[Point]) -> list[Point]:
    """Each point once: a policy that uses nothing of a home has the same one for all of them."""
    found: list[Point] = []
    for point in points:
        known = [each for each in found if each.policy == point.policy]
        if all(each.settings != point.settings for each in known):
            found.append(point)
    return found


def print_points(points: Sequence[Point], *, several_homes: bool) -> None:
    """The table of one task; over several homes without the intervals, for want of room."""
    first = points[0]
    intervals = "the JSON has intervals" if several_homes else "intervals of 95 %"
    title = f"{first.task}, {first.samples} of {first.available} samples, {intervals}"
    rows = [_row(point, several_homes=several_homes) for point in points]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        [*(row.get(name, "-") for name in columns), f"{point.seconds / point.samples:.1f}"]
        for row, point in zip(rows, points, strict=True)
    ]
    table(title, [*columns, "s a sample"], lines)


def print_averages(points: Sequence[Point], *, several_homes: bool) -> list[dict[str, Any]]:
    """The mean over the tasks, if there are several; returns it as plain values for JSON."""
    from infinigen_kv_lab.evals.averages import averages

    by_home: dict[str, list[Point]] = {}
    for point in points:
        by_home.setdefault(home_label(point.settings["storage"]), []).append(point)
    rows, found = [], []
    for label, mine in by_home.items():
        for average in averages(mine):
            home = {"home": label} if several_homes else {}
            rows.append({"policy": average.policy, **home, **average.headline()})
            found.append({**average.to_dict(), "storage": mine[0].to_dict()["settings"]["storage"]})
    if rows:
        tasks = ", ".join(found[0]["tasks"])
        title = f"mean of {tasks}, each task weighing the same, intervals of 95 %"
        table(title, list(rows[0]), [list(row.values()) for row in rows])
    return found


def _row(point: Point, *, several_homes: bool) -> dict[str, str]:
    row = {"policy": point.policy, **point.result.headline()}
    if not several_homes:
        return row
    row = {name: INTERVAL.sub("", text) for name, text in row.items()}
    label = home_label(point.settings["storage"])
    row["policy"] += "" if label == EVERYTHING else f" ({label})"
    costs = getattr(point.result, "costs", None)
    if costs is not None:
        row["KiB a step"] = f"{costs.fetched_bytes / KIB:.1f}"
        row["MiB held"] = f"{(costs.home_bytes + costs.device_bytes) / KIB**2:.1f}"
    return row
