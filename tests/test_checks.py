"""Checks of numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from infinigen_kv.checks import check_integer, is_integer, is_number
from infinigen_kv.errors import InputError


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, [1], math.nan])
def test_what_is_no_integer(value: Any) -> None:
    assert not is_integer(value)
    with pytest.raises(InputError) as caught:
        check_integer("rows", value, 0, instead=", or None")
    message = f"rows={value!r} is not valid: it must be an integer >= 0, or None"
    assert str(caught.value) == message


def test_the_least_is_allowed() -> None:
    check_integer("rows", 3, 3)
    with pytest.raises(InputError, match="rows=2 is not valid: it must be an integer >= 3"):
        check_integer("rows", 2, 3)


@pytest.mark.parametrize(
    ("value", "expected"), [(1, True), (0.5, True), (True, False), ("1", False)]
)
def test_numbers(value: Any, expected: bool) -> None:
    assert is_number(value) is expected
