"""Colours, and how each system is drawn in every picture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Okabe and Ito's colours, distinct to every kind of colour vision.
BLACK, GREY = "#000000", "#777777"
BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
RED, ORANGE, PURPLE = "#D55E00", "#E69F00", "#CC79A7"
PAPER = "#B22222"  # of the paper's own numbers
PAPER_DASHES = (0, (5, 3))
HEAT = "cividis"  # even and distinct to every kind of colour vision

Style = Mapping[str, Any]


def _style(
    color: str, marker: str, line: str = "-", width: float = 1.5, *, hollow: bool = False
) -> Style:
    return MappingProxyType(
        {
            "color": color,
            "marker": marker,
            "markerfacecolor": "white" if hollow else color,
            "linestyle": line,
            "linewidth": width,
        }
    )


# Where two systems of a kind share a colour, marker and dashes tell them apart, in grey too.
STYLES = {
    "infinigen": _style(BLUE, "o", "-", 2.2),
    "infinigen, no resident set": _style(BLUE, "s", "--"),
    "infinigen-paper": _style(SKY, "o", "--"),
    "oracle": _style(GREEN, "*", ":"),
    "oracle, no resident set": _style(GREEN, "*", ":"),
    "ideal": _style(BLACK, "x", "--", 1.2),
    "stream": _style(BLACK, "s", "-"),
    "stream-int8": _style(GREY, "s", "--"),
    "stream-int4": _style(GREY, "D", ":"),
    "h2o": _style(RED, "^", "-"),
    "scissorhands": _style(ORANGE, "v", "--"),
    "streaming-llm": _style(PURPLE, "D", "-."),
    "quest": _style(GREEN, "P", "-"),
    "paging": _style(GREY, "X", "-."),
    "paging-h2o": _style(RED, "X", "-."),
    "DynamicCache": _style(ORANGE, "h", "-."),
    "StaticCache": _style(PURPLE, "p", "--"),
    "QuantizedCache": _style(SKY, "d", ":"),
}
SPARE = (
    _style(RED, "<", ":", hollow=True),
    _style(PURPLE, ">", ":", hollow=True),
    _style(ORANGE, "s", ":", hollow=True),
    _style(SKY, "^", ":", hollow=True),
    _style(BLACK, "o", ":", hollow=True),
    _style(GREEN, "D", ":", hollow=True),
    _style(BLUE, "v", ":", hollow=True),
)
