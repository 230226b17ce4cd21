"""Sizes on the command line, by hand."""

from __future__ import annotations

import re

import pytest

from infinigen_kv import InputError
from infinigen_kv.cli.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20%", 0.2),
        ("0.2", 0.2),
        ("1.0", 1.0),
        ("100%", 1.0),
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("3 KiB", 3 * 1024),
        ("1.5MiB", 3 * 2**19),
        ("2GiB", 2**31),
    ],
)
def test_sizes(text: str, size: float) -> None:
    parsed = parse_size("resident", text)
    assert parsed == size and type(parsed) is type(size)


@pytest.mark.parametrize("text", ["", "%", "20 percent", "-1", "1e3", "1.2.3", "GiB", "5GB", "nan"])
def test_sizes_that_there_are_not(text: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"resident {text!r} is not valid")):
        parse_size("resident", text)
