"""Reading the user's files and writing results, with errors on one line."""

from __future__ import annotations

import sys
from pathlib import Path

from infinigen_kv.errors import InputError
from infinigen_kv.files import writable_folder, write_whole

STDIN = "-"


def read_text(path: str | Path, *, option: str) -> str:
    """Read UTF-8 text; ``-`` is stdin.

    Raises
    ------
    InputError
        The file is missing, unreadable, not UTF-8 or empty.
    """
    name = "stdin" if str(path) == STDIN else str(path)
    try:
        data = sys.stdin.buffer.read() if str(path) == STDIN else Path(path).read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{option} {name}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{option} {name}: not UTF-8 text (byte {error.start}): convert it first"
        ) from error
    except ValueError as error:  # a zero byte in the path
        raise InputError(f"{option} {name!r}: not a path ({error})") from error
    if not text.strip():
        raise InputError(f"{option} {name}: the text is empty")
    return text


def check_text(text: str, *, option: str) -> str:
    """Return a text from the command line; `InputError` if the shell passed bytes that are none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{option}: not UTF-8 text (character {error.start})") from error
    return text


def ensure_folder(path: Path, *, option: str) -> None:
    """Create an output folder and check that files can be written there."""
    writable_folder(path, option=option)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_whole(path, text)
