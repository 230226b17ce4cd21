"""The calibration of a model on disk: tensors as safetensors, the rest as JSON."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from infinigen_kv.calibration.cost import Stages
from infinigen_kv.calibration.fingerprint import check_fingerprint, digest
from infinigen_kv.calibration.replacing import aside_of, current, replace_folder
from infinigen_kv.calibration.tuned import Tuned
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import CalibrationError
from infinigen_kv.models.adapters.base import Adapter
from infinigen_kv.models.soundness import check_weights
from infinigen_kv.storage.config import StorageConfig

CPU = torch.device("cpu")
FORMAT = 2  # raised when artefacts of earlier versions can no longer be used
TENSORS = "calibration.safetensors"
HEADER = "calibration.json"


@dataclass(frozen=True, slots=True)
class LayerCalibration:
    """What one speculated layer needs, float32.

    ``down`` ``(M+1, r)`` and ``up`` ``(r, H * D)`` correct its query projection to read the
    previous layer's input (`rehearsal.predictor`); ``skew`` ``(H_kv, D, D)`` is the paper's A.
    """

    down: Tensor
    up: Tensor
    skew: Tensor


@dataclass(frozen=True)
class Calibration:
    """Everything learned offline about one model.

    Attributes
    ----------
    fingerprint
        Of the model (`model_fingerprint`).
    settings
        How it was made: rank, tokens, window, a hash of the texts.
    layers
        By layer index; layers that cannot be rehearsed are absent.
    report
        Per layer index, as strings: how well the prediction fits (see `calibrate`).
    tuned
        Settings that the command ``tune`` found for the model, or None.
    cost
        What calibrating took, stage by stage (`cost.Stages.to_dict`); empty where it was not
        recorded. ``saving`` is there once it was loaded from an artefact.
    precision
        In which type the model's weights were (`precision_of`); empty where it was not recorded.
    """

    fingerprint: Mapping[str, Any]
    settings: Mapping[str, Any]
    layers: Mapping[int, LayerCalibration]
    report: Mapping[str, Any] = field(default_factory=dict)
    tuned: Tuned | None = None
    cost: Mapping[str, Any] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)

    def config(self, **given: Any) -> InfiniGenConfig:
        """Settings for this model: those that are given, the tuned ones for the others.

        What was tuned goes with the calibrated rehearsal only.
        """
        calibrated = given.get("rehearsal") in (None, "calibrated")
        own = self.tuned.settings if self.tuned is not None and calibrated else {}
        if given.get("index_bits") is not None:  # which says what the ratio does
            own = {name: value for name, value in own.items() if name != "partial_ratio"}
        return InfiniGenConfig.from_dict({**own, **given})

    def storage(
        self, wanted: StorageConfig | None = None, device: torch.device = CPU
    ) -> StorageConfig:
        """Where this model's KV lives: as wanted, the tuned settings where that says nothing.

        They are for entries that have to move to the ``device``: ``wanted`` stays as it is where it
        has no link and no disk, and the device is a CPU.
        """
        given = wanted or StorageConfig()
        return given if self.tuned is None else self.tuned.storage(given, device)

    def check_model(self, adapter: Adapter) -> None:
        """Raise `CalibrationError` unless this calibration was made for the adapter's model.

        `InfiniGenError` where a weight of that is NaN or infinite: the fingerprint looks at a
        sample of the weights only.
        """
        check_weights(adapter)
        check_fingerprint(adapter, self.fingerprint, self.precision)
        for spec in adapter.layers[1:]:
            if not spec.is_sliding and spec.index not in self.layers:
                raise CalibrationError(
                    f"the calibration lacks layer {spec.index}: calibrate this model again"
                )
        if self.tuned is not None and len(self.tuned.alpha) != len(adapter.layers):
            raise CalibrationError(
                f"the calibration's tuned settings are for {len(self.tuned.alpha)} layers, and the "
                f"model has {len(adapter.layers)}: tune this model again"
            )
        full = {spec.index for spec in adapter.layers if not spec.is_sliding}
        kept = set() if self.tuned is None else set(self.tuned.resident_layers or ())
        if not kept <= full:
            raise CalibrationError(
                f"the calibration's tuned settings keep layers {sorted(kept)} whole, and those "
                f"with full attention are {sorted(full)}: tune this model again"
            )

    def save(self, folder: str | Path) -> Path:
        """Write the artefact into ``folder``, replacing one there; nothing half-written remains.

        A process that dies meanwhile leaves the old one or the new one, which `load` finds.
        """
        folder = Path(folder)
        check_target(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        header: dict[str, Any] = {
            "format": FORMAT,
            "fingerprint": dict(self.fingerprint),
            "settings": dict(self.settings),
            "report": dict(self.report),
            "precision": dict(self.precision),
            **({} if self.tuned is None else {"tuned": self.tuned.to_dict()}),
        }
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            staged = Path(scratch) / "new"
            staged.mkdir(mode=0o700)
            with Stages(CPU) as stages, stages.stage("saving"):
                payload = save_tensors(self._tensors())
                (staged / TENSORS).write_bytes(payload)
                header["tensors_sha256"] = sha256(payload).hexdigest()
            header["cost"] = {**self.cost, **stages.to_dict()} if self.cost else {}
            (staged / HEADER).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
            replace_folder(folder, staged, Path(scratch))
        return folder

    @classmethod
    def load(cls, folder: str | Path, *, with_tuned: bool = True) -> Calibration:
        """Read an artefact, on request without what was tuned, whatever state that is in.

        Raises
        ------
        CalibrationError
            If it is missing, damaged or of another format.
        """
        folder = current(Path(folder))
        header = _read_header(folder / HEADER)
        try:
            payload = (folder / TENSORS).read_bytes()
        except OSError as error:
            raise CalibrationError(f"cannot read {folder / TENSORS}: {error.strerror}") from error
        if sha256(payload).hexdigest() != header["tensors_sha256"]:
            raise CalibrationError(
                f"{folder / TENSORS} is damaged (its checksum differs): calibrate again"
            )
        try:
            tensors = load_tensors(payload)
        except SafetensorError as error:
            raise CalibrationError(f"{folder / TENSORS} is not safetensors: {error}") from error
        tuned = header.get("tuned") if with_tuned else None
        return cls(
            header["fingerprint"],
            header["settings"],
            _layers(tensors),
            header["report"],
            None if tuned is None else Tuned.from_dict(tuned),
            header["cost"],
            header["precision"],
        )

    def _tensors(self) -> dict[str, Tensor]:
        return {
            f"{index}.{name}": getattr(layer, name).contiguous()
            for index, layer in self.layers.items()
            for name in ("down", "up", "skew")
        }


def calibration_digest(calibration: Calibration) -> str:
    """Short name of what results depend on: how it was made, and what was tuned."""
    tuned = calibration.tuned
    own = None if tuned is None else {**tuned.settings, **tuned.storage_settings}
    return digest([dict(calibration.settings), own])


def check_target(folder: Path) -> None:
    """Raise `CalibrationError` if saving to ``folder`` would replace anything but an artefact."""
    for each in (folder, aside_of(folder)):
        if each.exists() and not _replaceable(each):
            raise CalibrationError(
                f"{each} exists and is not a calibration: choose another output folder"
            )


def _read_header(path: Path) -> dict[str, Any]:
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CalibrationError(
            f"no calibration at {path.parent}: cannot read {path.name} ({error.strerror})"
        ) from error
    except ValueError as error:
        raise CalibrationError(f"{path} is damaged: {error}; calibrate again") from error
    needed = ("fingerprint", "settings", "tensors_sha256")
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else type(header).__name__
        raise CalibrationError(
            f"{path} has format {found!r}, this version reads {FORMAT}: calibrate again"
        )
    missing = [name for name in needed if name not in header]
    if missing:
        raise CalibrationError(f"{path} lacks {missing[0]!r}: calibrate again")
    for name in ("fingerprint", "settings", "report", "cost", "precision"):
        if not isinstance(header.setdefault(name, {}), dict):
            raise CalibrationError(f"{path} is damaged: {name!r} is no object; calibrate again")
    for layer, fit in header["report"].items():
        if not (layer.isdecimal() and _is_fit(fit)):
            raise CalibrationError(
                f"{path} is damaged: its report on {layer!r} is not a layer's; calibrate again"
            )
    if not all(_is_cost(stage) for stage in header["cost"].values()):
        raise CalibrationError(f"{path} is damaged: its cost is no numbers; calibrate again")
    return header


def _is_cost(value: object) -> bool:
    numbers = value if isinstance(value, dict) else {}
    return all(_is_number(numbers.get(name)) for name in ("seconds", "peak_bytes"))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_fit(value: object) -> bool:
    return _is_number(value.get("unexplained") if isinstance(value, dict) else None)


def _layers(tensors: dict[str, Tensor]) -> dict[int, LayerCalibration]:
    try:
        indices = sorted({int(name.partition(".")[0]) for name in tensors})
        return {
            index: LayerCalibration(
                *(tensors[f"{index}.{name}"] for name in ("down", "up", "skew"))
            )
            for index in indices
        }
    except KeyError as error:
        raise CalibrationError(
            f"the calibration lacks the tensor {error}: calibrate again"
        ) from error
    except ValueError as error:
        raise CalibrationError(
            f"the calibration holds tensors of something else ({error}): calibrate again"
        ) from error


def _replaceable(folder: Path) -> bool:
    """Only ever delete what this class wrote, or nothing."""
    if not folder.is_dir():
        return False
    return {entry.name for entry in folder.iterdir()} <= {TENSORS, HEADER}


def remove(folder: Path) -> None:
    """Delete a cached artefact that turned out damaged."""
    folder = current(folder)
    if _replaceable(folder):
        shutil.rmtree(folder)
