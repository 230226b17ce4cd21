"""Sizes as they are typed on the command line."""

from __future__ import annotations

import math
import re

from infinigen_kv.errors import InputError

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_size(name: str, text: str, *, units: bool = True) -> int | float:
    """``20%`` or ``0.2`` to a share, ``512`` or, with ``units``, ``64MiB`` to an int."""
    match = re.fullmatch(r"([0-9.]+)\s*(%|[KMG]iB|B)?", text)
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    unit = match[2] if match and match[2] else ""
    if math.isnan(number) or (unit in UNITS and unit and not units):
        size = "a size like 64MiB" if units else "a number of tokens"
        raise InputError(
            f"{name} {text!r} is not valid: it must be a share like 20% or 0.2, or {size}"
        )
    if unit == "%":
        return number / 100
    if unit == "" and "." in text:
        return number
    return int(number * UNITS[unit])


def parse_budget(text: str | None) -> float:
    """``20%`` or ``0.2`` to a share; errors name the option."""
    from infinigen_kv.policies.settings import BUDGET, PolicySettings

    if text is None:
        return BUDGET
    try:
        return PolicySettings(budget=parse_size("--budget", text, units=False)).budget
    except InputError as error:
        raise InputError(
            f"--budget {text!r} is not valid: it must be a share of the cached tokens in (0, 1], "
            "e.g. 20% or 0.2"
        ) from error
