"""Several homes in one evaluation: capacities and codecs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from infinigen_kv.cli.sizes import parse_size
from infinigen_kv.cli.storage_options import StorageOptions
from infinigen_kv.errors import InputError

if TYPE_CHECKING:
    from infinigen_kv.storage.config import StorageConfig

NO_LIMIT = "none"
EVERYTHING = "all"  # of a home that holds everything as it is


def homes(
    options: StorageOptions, capacities: str | None, codecs: str | None
) -> list[StorageConfig]:
    """Every capacity with every codec; the option itself where there is no list.

    Parameters
    ----------
    capacities, codecs
        As typed, separated by commas, or None.

    Raises
    ------
    InputError
        If a list names none or one that is not valid, or is given beside its single option.
    """
    base = options.config()
    lists = {"capacity": ("--capacities", capacities), "codec": ("--codecs", codecs)}
    found = [base]
    for field, (option, text) in lists.items():
        if text is None:
            continue
        if f"--{field}" in options.given():
            raise InputError(f"--{field} and {option} exclude each other: leave one out")
        values = [_value(option, each) for each in _parts(option, text)]
        found = [
            _changed(option, each, field, value)
            for each in found
            for value in dict.fromkeys(values)
        ]
    return found


def home_label(storage: Mapping[str, Any]) -> str:
    """What tells a home of such a list, in short: ``50 %, int8``."""
    capacity, codec = storage["capacity"], storage["codec"]
    parts = [] if codec == "none" else [codec]
    if isinstance(capacity, float):
        parts.insert(0, f"{100 * capacity:g} %")
    elif capacity is not None:
        parts.insert(0, f"{capacity} tokens")
    return ", ".join(parts) or EVERYTHING


def _parts(option: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InputError(f"{option} {text!r} names none")
    return parts


def _value(option: str, text: str) -> str | int | float | None:
    if option == "--codecs":
        return text
    return None if text == NO_LIMIT else parse_size(option, text, units=False)


def _changed(option: str, base: StorageConfig, field: str, value: Any) -> StorageConfig:
    changes: dict[str, Any] = {field: value}
    try:
        return replace(base, **changes)
    except InputError as error:
        _, _, rest = str(error).partition("=")
        raise InputError(f"{option} {rest}") from error
