"""Settings that were tuned for one model, as its artefact keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from infinigen_kv.config import InfiniGenConfig, is_finite
from infinigen_kv.errors import CalibrationError, InputError


@dataclass(frozen=True, slots=True)
class Tuned:
    """What `tuning.tune` found; used wherever the user says nothing else.

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
    """

    alpha: tuple[float, ...]
    max_fetch: float
    partial_ratio: float
    target_kl: float
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of `InfiniGenConfig`."""
        return {
            "alpha": self.alpha,
            "max_fetch": self.max_fetch,
            "partial_ratio": self.partial_ratio,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "alpha": list(self.alpha), "measured": dict(self.measured)}

    @classmethod
    def from_dict(cls, values: object) -> Tuned:
        """Back from JSON.

        Raises
        ------
        CalibrationError
            The values are not what `to_dict` gives.
        """
        names = {each.name for each in fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            raise CalibrationError("the calibration's tuned settings are damaged: tune again")
        try:
            checked = InfiniGenConfig(
                **{name: values[name] for name in ("alpha", "max_fetch", "partial_ratio")}
            )
        except InputError as error:
            raise CalibrationError(
                f"the calibration's tuned settings are damaged ({error}): tune again"
            ) from error
        target, measured = values["target_kl"], values["measured"]
        alpha = checked.alpha
        if (
            not isinstance(alpha, tuple)
            or not isinstance(measured, dict)
            or values["partial_ratio"] is None
            or not is_finite(target)
            or target <= 0
        ):
            raise CalibrationError("the calibration's tuned settings are damaged: tune again")
        return cls(alpha, checked.max_fetch, checked.partial_ratio, float(target), measured)
