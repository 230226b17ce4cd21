"""Measured points on disk, one JSON file each, so that an interrupted run goes on."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from infinigen_kv.errors import InputError

FOLDER = "points"

Result = dict[str, Any]


class Named(Protocol):
    """A measurement: what its file starts with, and what that is called.

    ``about`` is what its result depends on beyond itself.
    """

    def record(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """The head of its file, as it comes back from JSON."""

    def file_name(self, about: Mapping[str, Any]) -> str:
        """A name that tells measurements with other settings apart."""


class PointStore:
    """Finished points in a folder.

    A file is written whole or not at all. One that is damaged, or that does not say what its name
    stands for, counts as absent and is overwritten by the next measurement.

    Parameters
    ----------
    folder
        Is created where it does not exist.
    say
        Told in one line about a file that cannot be used.

    Raises
    ------
    InputError
        The folder cannot be written to.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        writable_folder(folder)

    def path(self, point: Named, about: Mapping[str, Any]) -> Path:
        """Where a point's result is or will be."""
        return self._folder / point.file_name(about)

    def get(self, point: Named, about: Mapping[str, Any]) -> Result | None:
        """A finished point's result; None where there is none of use."""
        path = self.path(point, about)
        try:
            return _result(path, point.record(about))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._say(f"{path} {_reason(error)}: measured again")
            return None

    def put(self, point: Named, about: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Keep a finished point."""
        held = {**point.record(about), "result": plain(result)}
        write_whole(self.path(point, about), to_json(held))


def _result(path: Path, head: Mapping[str, Any]) -> Result:
    """A file's result, if the rest of it is ``head``; `ValueError` if not."""
    held = json.loads(path.read_bytes())
    result = held.pop("result", None) if isinstance(held, dict) else None
    if not isinstance(result, dict):
        raise ValueError("holds no result")
    if held != head:
        raise ValueError("is not what its name stands for")
    return result


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror})"
    # what a JSON or UTF-8 decoder says is about a place in the text
    return f"is damaged ({error})" if type(error) is not ValueError else str(error)


def writable_folder(folder: Path) -> None:
    """Create a folder and make sure that files can be written there; `InputError` if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be written to ({error.strerror}): choose another folder"
        ) from error


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file whole or not at all."""
    content = data.encode() if isinstance(data, str) else data
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        staged = Path(scratch) / path.name
        staged.write_bytes(content)
        staged.replace(path)


def to_json(values: Any) -> str:
    """Strict JSON for people: NaN, which it has no word for, becomes null."""
    return json.dumps(plain(values), allow_nan=False, ensure_ascii=False, indent=1) + "\n"


def plain(value: Any) -> Any:
    """Containers and numbers that JSON knows."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
