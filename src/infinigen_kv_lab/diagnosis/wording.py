"""Numbers and layers in words, the same on the terminal, on the page and in messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable


def percent(share: float, digits: int | None = None) -> str:
    """A share as per cent, by default with two digits where it is below 10 %; a dash for NaN."""
    if math.isnan(share):
        return "-"
    if digits is None:
        digits = 1 if 0 < abs(share) < 0.0995 else 0
    return f"{share:.{digits}%}".removesuffix("%") + " %"


def span(values: Iterable[float], write: Callable[[float], str]) -> str:
    """``least to largest``, or the one where they read the same; NaN is left out."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "-"
    low, high = write(min(known)), write(max(known))
    if low == high:
        return low
    return f"{low.removesuffix(' %') if high.endswith(' %') else low} to {high}"


def join_layers(layers: Iterable[int]) -> str:
    """Layer numbers, runs of three and more as ranges: ``1, 2, 5-9``."""
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    words: list[str] = []
    for run in parts:
        words += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return ", ".join(words)


def name_layers(layers: Iterable[int]) -> str:
    """``layer 1`` or ``layers 1, 5-9``."""
    found = list(layers)
    return f"layer{'s' if len(found) > 1 else ''} {join_layers(found)}"
