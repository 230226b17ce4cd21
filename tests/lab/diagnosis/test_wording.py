"""Numbers and layers in words."""

from __future__ import annotations

import math

import pytest

from infinigen_kv_lab.diagnosis.wording import join_layers, name_layers, percent, span


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.0, "0 %"), (0.0312, "3.1 %"), (0.0996, "10 %"), (0.41, "41 %"), (1.2, "120 %")],
)
def test_percent(share: float, words: str) -> None:
    assert percent(share) == words


def test_percent_of_what_is_unknown_and_with_digits() -> None:
    assert percent(math.nan) == "-"
    assert percent(0.41234, 2) == "41.23 %"


def test_span() -> None:
    assert span([0.41, 0.02, math.nan], percent) == "2.0 to 41 %"
    assert span([0.411, 0.412], percent) == "41 %"
    assert span([math.nan], percent) == "-"
    assert span([0.5, 0.25], "{:.2f}".format) == "0.25 to 0.50"


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([1], "layer 1"),
        ([2, 1], "layers 1, 2"),
        ([9, 1, 5, 6, 7, 8, 2], "layers 1, 2, 5-9"),
    ],
)
def test_layers(layers: list[int], words: str) -> None:
    assert name_layers(layers) == words
    assert name_layers(iter(layers)) == words
    assert words.endswith(join_layers(layers))
