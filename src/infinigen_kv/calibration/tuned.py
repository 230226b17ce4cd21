"""Settings that were tuned for one model, as its artefact keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from infinigen_kv.config import InfiniGenConfig, is_finite
from infinigen_kv.errors import CalibrationError, InputError
from infinigen_kv.storage.config import StorageConfig

NEWER = ("resident", "resident_layers")  # fields that older artefacts lack
DAMAGED = "the calibration's tuned settings are damaged"


@dataclass(frozen=True, slots=True)
class Tuned:
    """What the command ``tune`` found; used wherever the user says nothing else.

    Parameters
    ----------
    alpha
        One for each layer of the model; those of layers that cannot be rehearsed are not used.
    max_fetch
        Largest share of the cached tokens that a step may attend to.
    partial_ratio
        That it was tuned with.
    target_kl
        KL(full || selected) of the next token that was asked for, in nats.
    measured
        What was found on the way, for people: plain values.
    resident, resident_layers
        Of `StorageConfig`, where the model's entries have to move; None for its own defaults.
    """

    alpha: tuple[float, ...]
    max_fetch: float
    partial_ratio: float
    target_kl: float
    measured: Mapping[str, Any] = field(default_factory=dict)
    resident: float | int | None = None
    resident_layers: tuple[int, ...] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of `InfiniGenConfig`."""
        return {
            "alpha": self.alpha,
            "max_fetch": self.max_fetch,
            "partial_ratio": self.partial_ratio,
        }

    @property
    def storage_settings(self) -> dict[str, Any]:
        """Fields of `StorageConfig`, those that differ from its defaults."""
        own = {"resident": self.resident, "resident_layers": self.resident_layers}
        return {name: value for name, value in own.items() if value is not None}

    def storage(self, wanted: StorageConfig, device: torch.device) -> StorageConfig:
        """``wanted`` with these settings where it says nothing; as it is where nothing moves."""
        moves = replace(wanted, resident=None).resident_budget_on(device) > 0
        if wanted.is_local_on(device) or not moves:
            return wanted
        defaults = {"resident": None, "resident_layers": "auto"}
        return replace(
            wanted,
            **{
                name: value
                for name, value in self.storage_settings.items()
                if getattr(wanted, name) == defaults[name]
            },
        )

    def first(self, layers: int) -> Tuned:
        """For a model of the first ``layers`` layers alone."""
        kept = self.resident_layers
        return replace(
            self,
            alpha=self.alpha[:layers],
            resident_layers=None if kept is None else tuple(i for i in kept if i < layers),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        kept = self.resident_layers
        return {
            **asdict(self),
            "alpha": list(self.alpha),
            "measured": dict(self.measured),
            "resident_layers": None if kept is None else list(kept),
        }

    @classmethod
    def from_dict(cls, values: object) -> Tuned:
        """Back from JSON.

        Raises
        ------
        CalibrationError
            The values are not what `to_dict` gives.
        """
        names = {each.name for each in fields(cls)}
        held = {**dict.fromkeys(NEWER), **values} if isinstance(values, dict) else {}
        if set(held) != names:
            raise CalibrationError(f"{DAMAGED}: tune again")
        try:
            checked = InfiniGenConfig(
                **{name: held[name] for name in ("alpha", "max_fetch", "partial_ratio")}
            )
            layers = held["resident_layers"]
            stored = StorageConfig(
                resident=held["resident"],
                resident_layers="auto" if layers is None else layers,
            )
        except InputError as error:
            raise CalibrationError(f"{DAMAGED} ({error}): tune again") from error
        target, measured = held["target_kl"], held["measured"]
        alpha = checked.alpha
        if (
            not isinstance(alpha, tuple)
            or not isinstance(measured, dict)
            or held["partial_ratio"] is None
            or not is_finite(target)
            or target <= 0
        ):
            raise CalibrationError(f"{DAMAGED}: tune again")
        kept = stored.resident_layers
        return cls(
            alpha,
            checked.max_fetch,
            checked.partial_ratio,
            float(target),
            measured,
            stored.resident,
            None if kept == "auto" else tuple(kept),
        )
