"""Measured points on disk, one JSON file each, so that an interrupted run goes on."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from infinigen_kv.calibration.fingerprint import digest
from infinigen_kv.files import plain, writable_folder, write_whole

FOLDER = "points"
CHECKSUM = "sha256"

Result = dict[str, Any]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PointKey:
    """What a point is: all that its result depends on, and the name of its file.

    Parameters
    ----------
    file_name
        Other for points with another head.
    head
        What the file starts with, as it comes back from JSON.
    """

    file_name: str
    head: Mapping[str, Any]

    @classmethod
    def of(cls, prefix: str, head: Mapping[str, Any]) -> PointKey:
        """A key whose file is called ``prefix`` and a digest of the head."""
        values = json.loads(json.dumps(plain(head)))
        return cls(f"{prefix}-{digest(values)}.json", values)


class PointStore:
    """Finished points in a folder; without one they are kept in memory.

    A file is written whole or not at all. One that is damaged, or that does not say what its name
    stands for, counts as absent and is overwritten by the next measurement. Files of versions that
    wrote no checksum are read.

    Parameters
    ----------
    folder
        Is created where it does not exist.
    say
        Told in one line about a file that cannot be used.
    reuse
        Whether points are found that an earlier run left.

    Raises
    ------
    InputError
        The folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path | None,
        say: Callable[[str], None] = logger.warning,
        *,
        reuse: bool = True,
    ) -> None:
        self._folder = folder
        self._say = say
        self._reuse = reuse
        self._written: dict[str, bytes] = {}
        if folder is not None:
            writable_folder(folder)

    def path(self, key: PointKey) -> Path:
        """Where a point is or will be; in memory, its name alone."""
        return (self._folder or Path()) / key.file_name

    def get(self, key: PointKey) -> Result | None:
        """What was put under a key; None where there is nothing of use."""
        name, path = key.file_name, self.path(key)
        if name not in self._written and (self._folder is None or not self._reuse):
            return None
        try:
            content = self._written[name] if self._folder is None else path.read_bytes()
            return _values(content, key.head)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say(f"{path} cannot be read ({error.strerror}): measured again")
        except ValueError as error:
            # what a JSON or UTF-8 decoder says is about a place in the text
            reason = f"is damaged ({error})" if type(error) is not ValueError else str(error)
            self._say(f"{path} {reason}: measured again")
        return None

    def put(self, key: PointKey, values: Mapping[str, Any]) -> Result:
        """Keep what was measured of a point under the names of ``values``; as it will come back."""
        kept: Result = plain(values)
        held = {**key.head, **kept, CHECKSUM: _checksum(kept)}
        content = (json.dumps(held, allow_nan=False, ensure_ascii=False) + "\n").encode()
        if self._folder is not None:
            write_whole(self.path(key), content)
        self._written[key.file_name] = content if self._folder is None else b""
        return kept


def _values(content: bytes, head: Mapping[str, Any]) -> Result:
    """A file's values, if the rest of it is ``head``; `ValueError` if not."""
    held = json.loads(content)
    if not isinstance(held, dict):
        raise ValueError("holds no result")
    if any(held.pop(name, None) != value for name, value in head.items()):
        raise ValueError("is not what its name stands for")
    checksum = held.pop(CHECKSUM, None)
    if checksum is not None and checksum != _checksum(held):
        raise ValueError("is damaged (its checksum differs)")
    if not held:
        raise ValueError("holds no result")
    return held


def _checksum(values: Mapping[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
