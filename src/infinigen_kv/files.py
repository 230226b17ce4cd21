"""Files that are whole or not there at all, folders (the user's cache too), and strict JSON."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

from infinigen_kv.errors import InputError

CACHE_VARIABLE = "INFINIGEN_KV_CACHE"  # names the folder of `cache_dir`


def cache_dir() -> Path:
    """Folder for what is computed once (converted models, calibrations), made with mode 0700.

    Returns
    -------
    Path
        ``$INFINIGEN_KV_CACHE`` where that is set and not empty, else the platform's cache folder.

    Raises
    ------
    InputError
        The folder cannot be created.
    """
    chosen = os.environ.get(CACHE_VARIABLE, "")
    try:
        path = (
            Path(chosen).expanduser().absolute()
            if chosen
            else platformdirs.user_cache_path("infinigen-kv", appauthor=False)
        )
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: "~" without a home folder
        raise InputError(
            f"the cache folder cannot be created ({error}): "
            f"set {CACHE_VARIABLE} to a folder that can be written"
        ) from error
    return path


def writable_folder(folder: Path, *, option: str = "") -> None:
    """Create a folder and make sure that files can be written there.

    Parameters
    ----------
    option
        Of the command line, where the folder was named with one; starts the error's line.

    Raises
    ------
    InputError
        They cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        where = f"{option} {folder}".strip()
        raise InputError(
            f"{where}: cannot be written to ({error.strerror}): choose another folder"
        ) from error


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file (text as UTF-8) so that it is the old one or the new one, whole, at any time."""
    content = data.encode() if isinstance(data, str) else data
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        staged = Path(scratch) / path.name
        staged.write_bytes(content)
        staged.replace(path)


def to_json(values: Any) -> str:
    """Strict JSON for people: NaN, which it has no word for, becomes null."""
    return json.dumps(plain(values), allow_nan=False, ensure_ascii=False, indent=1) + "\n"


def plain(value: Any) -> Any:
    """``value`` as JSON holds it: tuples as lists, keys as text, NaN and infinities as None."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
