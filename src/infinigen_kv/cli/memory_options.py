"""The option that limits memory."""

from __future__ import annotations

from typing import Annotated

import typer

from infinigen_kv.cli.sizes import parse_size
from infinigen_kv.errors import InputError

DeviceMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--device-memory",
        metavar="SIZE",
        help="Memory of the device that may be used, weights included, e.g. 24GiB. "
        "[default: what the machine has]",
        show_default=False,
    ),
]


def parse_memory(option: str, text: str | None) -> int | None:
    """Bytes of ``24GiB``; None stays None."""
    if text is None:
        return None
    size = parse_size(option, text)
    if isinstance(size, float) or size < 1:
        raise InputError(f"{option} {text!r} is not valid: it must be a size like 24GiB")
    return size
