"""What the rehearsal of one layer takes from the model and its calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from infinigen_kv.rehearsal.statistics import Magnitudes, Moments, PromptStatistics

if TYPE_CHECKING:
    from infinigen_kv.policies.step import Step

PredictQuery = Callable[[Tensor, "Step"], Tensor]
"""``(hidden (B, Q, M), step) -> (B, H, Q, D)``: this layer's query from the previous layer."""


@dataclass(frozen=True, slots=True)
class RehearsalLayer:
    """What the rehearsal of one layer needs from the model and its calibration."""

    predict_query: PredictQuery
    skew: Tensor | None
    """``(H_kv, D, D)`` for the paper's rehearsal, None for the calibrated one."""
    scaling: float
    softcap: float | None
    alpha: float
    """The layer's own, see `InfiniGenConfig`."""

    def sums(self, keys: Tensor, values: Tensor, *, tail: bool) -> PromptStatistics:
        """Empty sums for keys and values like these; of values only where a ``tail`` wants them."""
        if self.skew is not None:
            return Magnitudes.start(keys, self.skew)
        return Moments.start(keys, values if tail else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> RehearsalLayer:
        """The same one: copies of a cache share the model's weights."""
        return self
