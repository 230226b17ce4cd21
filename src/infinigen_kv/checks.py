"""Checks of numbers that users give, with one wording for all."""

from __future__ import annotations

from infinigen_kv.errors import InputError


def is_integer(value: object) -> bool:
    """Whether it is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is an integer or a float; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_integer(name: str, value: object, least: int, *, instead: str = "") -> None:
    """Raise `InputError` unless ``value`` is an integer of at least ``least``.

    ``instead`` says what else is allowed, e.g. ``", or None for all"``.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(
            f"{name}={value!r} is not valid: it must be an integer >= {least}{instead}"
        )
