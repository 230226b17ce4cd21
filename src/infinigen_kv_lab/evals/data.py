"""The user's data files: where they are expected, and what is wrong with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from infinigen_kv.errors import InputError

Record = dict[str, Any]


def data_file(folder: Path | None, place: str, *, task: str, what: str) -> Path:
    """The file ``place`` under the data folder.

    Raises
    ------
    InputError
        It is not there; says ``what`` to fetch and where to put it.
    """
    if folder is None:
        raise InputError(
            f"task {task!r} needs {what}: put it into a folder as {place}, and name "
            "the folder with --data DIR"
        )
    path = folder / place
    if not path.is_file():
        raise InputError(f"task {task!r}: {path} is missing: fetch {what} and put it there")
    return path


def data_files(
    folder: Path | None, place: str, endings: tuple[str, ...], *, task: str, what: str
) -> list[Path]:
    """The files of the data folder's folder ``place`` that end so, in the order of their names.

    ``SOURCE.txt`` and ``README.txt`` say where the others are from, and are left out.

    Raises
    ------
    InputError
        There are none; says ``what`` to fetch and where to put it.
    """
    if folder is None:
        raise InputError(
            f"task {task!r} needs {what}: put them into a folder as {place}/*{endings[0]}, and "
            "name the folder with --data DIR"
        )
    files = [each for each in sorted((folder / place).glob("*")) if each.suffix in endings]
    files = [each for each in files if each.is_file() and each.stem not in ("SOURCE", "README")]
    if not files:
        raise InputError(
            f"task {task!r}: {folder / place} holds no file that ends in {', '.join(endings)}: "
            f"fetch {what} and put them there"
        )
    return files


def read_lines(path: Path) -> list[str]:
    """Lines of a UTF-8 file without their ends; only a line feed ends a line."""
    return read_utf8(path).removesuffix("\n").split("\n")


def read_utf8(path: Path) -> str:
    """A UTF-8 file, line ends as they are.

    Raises
    ------
    InputError
        The file cannot be read, is not UTF-8 or holds no text.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from error
    if not text.strip():
        raise InputError(f"{path}: the file is empty")
    return text


def read_jsonl(
    path: Path,
    fields: Iterable[str],
    check: Callable[[Record], Record] = dict,
) -> list[Record]:
    """Objects of a JSON Lines file; blank lines are skipped.

    Parameters
    ----------
    fields
        What every object must have.
    check
        Makes of an object what is returned, or raises `ValueError`.

    Raises
    ------
    InputError
        A line is no JSON object, lacks a field or does not pass the check; says which line.
    """
    wanted = list(fields)
    records = []
    for number, line in enumerate(read_utf8(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number}: not JSON ({error.msg})") from error
        if not isinstance(record, dict):
            raise InputError(f"{path}, line {number}: not a JSON object")
        missing = [name for name in wanted if name not in record]
        if missing:
            raise InputError(
                f"{path}, line {number}: no field {missing[0]!r}; needed: {', '.join(wanted)}"
            )
        try:
            records.append(check(record))
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
    return records


def digest(*texts: str) -> str:
    """Short name of texts, so that measurements of other texts are not taken for theirs."""
    running = hashlib.sha256()
    for text in texts:
        running.update(f"{len(text)}:".encode() + text.encode())
    return running.hexdigest()[:16]
