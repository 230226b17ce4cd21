"""Samples that were measured of a task under a policy, kept so that an interrupted run goes on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infinigen_kv.calibration.fingerprint import digest
from infinigen_kv.files import plain
from infinigen_kv_lab.evals.task import Sample
from infinigen_kv_lab.points import PointKey, PointStore

FORMAT = 1  # raised when samples of earlier files no longer mean the same


def sample_key(task: str, policy: str, settings: Mapping[str, Any]) -> PointKey:
    """What samples are kept under; ``settings`` are all that they depend on beside the names."""
    values = plain(settings)
    names = (re.sub(r"[^A-Za-z0-9._-]+", "-", name) for name in (task, policy))
    return PointKey(
        ".".join([*names, digest([FORMAT, values])[:12], "json"]),
        {"format": FORMAT, "task": task, "policy": policy, "settings": values},
    )


class SampleStore:
    """Reads and writes samples in a folder; without one they are kept in memory.

    Parameters
    ----------
    folder, reuse
        As in `PointStore`.
    """

    def __init__(self, folder: Path | None, *, reuse: bool = True) -> None:
        self._points = PointStore(folder, reuse=reuse)

    def samples(self, key: PointKey) -> list[Sample]:
        """What was measured, in order; empty where there is nothing of use."""
        point = self._points.get(key)
        return [] if point is None else list(point.get("samples", ()))

    def keep(
        self, key: PointKey, samples: Sequence[Sample], result: dict[str, Any] | None = None
    ) -> None:
        """Write what is measured so far; with ``result`` once it is finished."""
        self._points.put(
            key, {"finished": result is not None, "result": result, "samples": list(samples)}
        )
