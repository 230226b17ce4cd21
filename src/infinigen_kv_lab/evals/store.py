"""Measured points on disk, one JSON file each, so that an interrupted run goes on."""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.task import Sample, plain

FORMAT = 1  # raised when samples of earlier files no longer mean the same

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PointKey:
    """What a point is: the task, the policy, and all settings that its figures depend on."""

    task: str
    policy: str
    settings: dict[str, Any]

    @property
    def file_name(self) -> str:
        """A name that tells points with different settings apart."""
        text = json.dumps([FORMAT, plain(self.settings)], sort_keys=True)
        short = sha256(text.encode()).hexdigest()[:12]
        task = re.sub(r"[^A-Za-z0-9._-]+", "-", self.task)
        policy = re.sub(r"[^A-Za-z0-9._-]+", "-", self.policy)
        return f"{task}.{policy}.{short}.json"

    def record(self) -> dict[str, Any]:
        """The head of the file."""
        return {
            "format": FORMAT,
            "task": self.task,
            "policy": self.policy,
            "settings": plain(self.settings),
        }


class PointStore:
    """Reads and writes points in a folder; without one they are kept in memory.

    A file is written whole or not at all. One that is damaged or belongs to other settings counts
    as absent, and is overwritten by the next measurement.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._memory: dict[str, list[Sample]] = {}
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise InputError(
                f"{folder}: cannot be written to ({error.strerror}): choose another folder"
            ) from error

    def samples(self, key: PointKey) -> list[Sample]:
        """What was measured of a point, in order; empty where there is nothing of use."""
        if self._folder is None:
            return list(self._memory.get(key.file_name, []))
        path = self._folder / key.file_name
        try:
            held = json.loads(path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read, measuring again: %s", path, error)
            return []
        samples = held.get("samples") if isinstance(held, dict) else None
        if not isinstance(samples, list) or not all(isinstance(each, dict) for each in samples):
            logger.warning("%s holds no samples, measuring again", path)
            return []
        if held.get("samples_sha256") != _checksum(samples):
            logger.warning("%s is damaged, measuring again", path)
            return []
        if any(held.get(name) != value for name, value in key.record().items()):
            logger.warning("%s belongs to other settings, measuring again", path)
            return []
        return samples

    def keep(
        self, key: PointKey, samples: Sequence[Sample], result: dict[str, Any] | None = None
    ) -> None:
        """Write what is measured of a point so far; with ``result`` once it is finished."""
        if self._folder is None:
            self._memory[key.file_name] = list(samples)
            return
        path = self._folder / key.file_name
        held = {
            **key.record(),
            "finished": result is not None,
            "result": result,
            "samples": list(samples),
            "samples_sha256": _checksum(samples),
        }
        text = json.dumps(plain(held), allow_nan=False, ensure_ascii=False)
        with tempfile.TemporaryDirectory(dir=self._folder, prefix=".point-") as scratch:
            staged = Path(scratch) / path.name
            staged.write_text(text + "\n", encoding="utf-8")
            staged.replace(path)


def _checksum(samples: Sequence[Sample]) -> str:
    return sha256(json.dumps(plain(list(samples)), sort_keys=True).encode()).hexdigest()
