"""What a cache keeps on the device, so that settings are compared at equal device memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.policies.layer_roles import resident_layers, speculated_layers
from infinigen_kv_lab.tuning.options import TuneOptions
from infinigen_kv_lab.tuning.trial import Trials

SMALLEST = 0.02  # resident share below which a cache is not worth a trial


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """Sizes in units of one layer's KV, for layers of one size.

    Parameters
    ----------
    whole
        Layers that are on the device whole already.
    apart
        Layers with a home apart from the device, each with a resident set.
    selecting
        Those of them that select, each with partial keys.
    head_dim
        D.
    """

    whole: tuple[int, ...]
    apart: int
    selecting: int
    head_dim: int

    @classmethod
    def of(cls, trials: Trials, options: TuneOptions) -> DeviceShare:
        """Of the model and these settings."""
        adapter = adapter_for(trials.model)
        speculated = speculated_layers(adapter.layers, options.config())
        kept = resident_layers(
            adapter.layers,
            options.storage,
            speculated,
            trials.model.device,
            trials.calibration.report,
        )
        full = [spec for spec in adapter.layers if not spec.is_sliding]
        return cls(
            tuple(sorted(kept)),
            len(full) - len(kept),
            len(speculated - kept),
            max(spec.head_dim for spec in full),
        )

    def size(self, ratio: float, resident: float) -> float:
        """Partial keys and resident sets together."""
        return self.selecting * self._keys(ratio) + self.apart * resident

    def resident(self, size: float, ratio: float, more: int = 0) -> float | None:
        """The resident share that makes `size` with another ratio and ``more`` whole layers.

        None where too little is left of it. Rounded down.
        """
        apart, selecting = self.apart - more, self.selecting - more
        if selecting < 1:
            return None
        share = (size - more - selecting * self._keys(ratio)) / apart
        share = math.floor(share * 10_000 + 1e-6) / 10_000
        return min(1.0, share) if share >= SMALLEST else None

    def _keys(self, ratio: float) -> float:
        """R of the 2 D numbers of an entry."""
        rank = InfiniGenConfig(partial_ratio=ratio).partial_dim(self.head_dim)
        return rank / (2 * self.head_dim)
