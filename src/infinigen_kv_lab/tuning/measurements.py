"""What tuning measured, window by window, kept so that interrupted and later runs reuse it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.calibration.fingerprint import digest, model_digest
from infinigen_kv.files import cache_dir, plain
from infinigen_kv.kernels.finding import find_kernels
from infinigen_kv_lab.points import PointKey, PointStore
from infinigen_kv_lab.tuning.windows import Window

FORMAT = 1  # raised when earlier results no longer mean the same

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One window under some settings; ``what`` are plain values that tell it from all others."""

    kind: str
    what: Mapping[str, Any]

    def key(self, about: Mapping[str, Any]) -> PointKey:
        """What it is kept under, where its values depend on ``about``, too."""
        return PointKey.of(
            self.kind, {"format": FORMAT, "kind": self.kind, "what": self.what, **about}
        )


class Measurements:
    """Measures what was not measured before.

    Parameters
    ----------
    folder
        Where results are kept, readable by the user alone; None keeps them as long as this object.
    about
        What they depend on beyond their settings; see `dependencies`.
    again
        Measure what an earlier run left there anew.

    Raises
    ------
    InputError
        The folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path | None = None,
        about: Mapping[str, Any] | None = None,
        again: bool = False,
    ) -> None:
        self._about = dict(about or {})
        self._known: dict[str, dict[str, Any]] = {}
        if folder is not None:
            with suppress(OSError):  # which the store reports
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._store: PointStore | None = PointStore(folder, reuse=not again)

    def of(
        self,
        measurement: Measurement,
        measure: Callable[[], Mapping[str, Any]],
        read: Callable[[Mapping[str, Any]], T],
    ) -> T:
        """What ``read`` makes of a measurement's values.

        ``read`` raises `ValueError`, `KeyError` or `TypeError` for values that are of no use, which
        are measured anew.
        """
        key = measurement.key(self._about)
        name = key.file_name
        held = self._known.get(name) or self._held(key)
        if held is not None:
            try:
                found = read(held)
            except (ValueError, KeyError, TypeError) as error:
                logger.warning("%s lacks what is needed (%s): measured again", name, error)
            else:
                self._known[name] = held
                return found
        values = plain(measure())
        self._known[name] = values
        self._keep(key, values)
        return read(values)

    def _keep(self, key: PointKey, values: dict[str, Any]) -> None:
        if self._store is None:
            return
        try:
            self._store.put(key, {"result": values})
        except OSError as error:  # e.g. a full disk: no reason to lose what was measured
            logger.warning("measurements are not kept from now on: %s", error)
            self._store = None

    def _held(self, key: PointKey) -> dict[str, Any] | None:
        point = None if self._store is None else self._store.get(key)
        return None if point is None else dict(point["result"])


def default_folder(about: Mapping[str, Any]) -> Path:
    """Where the user's cache keeps what was measured of one model."""
    return cache_dir() / "tuning" / digest(dict(about))


def dependencies(model: PreTrainedModel, calibration: Calibration) -> dict[str, Any]:
    """What every measurement of a model depends on beside its own settings."""
    return {
        "version": version("infinigen-kv"),
        "model": model_digest(model),
        "calibration": _calibration_digest(calibration),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "kernels": find_kernels("auto", model.device, model.dtype).name,
    }


def window_digest(window: Window) -> dict[str, Any]:
    """Plain values that tell a window's tokens from others'."""
    ids = [*window.prompt.tolist(), *window.decoded.tolist()]
    return {"tokens": digest(ids), "prompt_tokens": window.prompt.numel()}


def _sum(values: Mapping[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _calibration_digest(calibration: Calibration) -> str:
    running = sha256(json.dumps(dict(calibration.settings), sort_keys=True).encode())
    for index, layer in sorted(calibration.layers.items()):
        running.update(str(index).encode())
        for tensor in (layer.down, layer.up, layer.skew):
            running.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return running.hexdigest()[:16]
