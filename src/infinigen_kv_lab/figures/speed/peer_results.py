"""Results that other programs wrote (scripts under ``benchmarks/peers``), to be drawn beside ours.

A file is a JSON object: ``format``, ``source`` (the program and its version), ``settings``, and
``points``, a list of objects with ``system`` and either ``context`` and ``tokens_per_s``, or
``link_bytes_per_token`` and ``kl_to_ideal``. ``settings.prompt_sha256`` says which prompt was read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinigen_kv.errors import InputError

FORMAT = "infinigen-kv peers 1"
SPEED = ("context", "tokens_per_s")
ACCURACY = ("link_bytes_per_token", "kl_to_ideal")


@dataclass(frozen=True, slots=True)
class PeerResults:
    """One file's results."""

    path: str
    source: str
    settings: dict[str, Any]
    points: tuple[dict[str, Any], ...]

    def with_columns(self, columns: Sequence[str]) -> list[dict[str, Any]]:
        """Points that hold these numbers: `SPEED` or `ACCURACY`."""
        return [point for point in self.points if all(name in point for name in columns)]


def read_peer_results(path: Path) -> PeerResults:
    """Read a results file.

    Raises
    ------
    InputError
        It cannot be read, or holds something else; says what.
    """
    try:
        held = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"--peers {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"--peers {path}: is not JSON ({error})") from error
    if not isinstance(held, dict) or held.get("format") != FORMAT:
        raise InputError(
            f"--peers {path}: its format is not {FORMAT!r}; scripts in benchmarks/peers write it"
        )
    points = held.get("points")
    if not isinstance(points, list) or not points:
        raise InputError(f"--peers {path}: 'points' is not a list with something in it")
    for number, point in enumerate(points, start=1):
        _check(path, number, point)
    settings = held.get("settings")
    return PeerResults(
        path=str(path),
        source=str(held.get("source", path.name)),
        settings=settings if isinstance(settings, dict) else {},
        points=tuple(points),
    )


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Name of a prompt, for programs that must have read the same one."""
    return hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()


def _check(path: Path, number: int, point: object) -> None:
    where = f"--peers {path}: point {number}"
    if not isinstance(point, dict) or not isinstance(point.get("system"), str):
        raise InputError(f"{where} names no 'system'")
    kinds = [kind for kind in (SPEED, ACCURACY) if all(name in point for name in kind)]
    if not kinds:
        raise InputError(f"{where} has neither {' and '.join(SPEED)} nor {' and '.join(ACCURACY)}")
    for name in kinds[0]:
        value = point[name]
        number_ = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number_ or not math.isfinite(value) or value < 0:
            raise InputError(f"{where}: {name}={value!r} is not a number >= 0")
