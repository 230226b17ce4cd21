"""The engine's own decode steps on windows of text: KL, entries that crossed, what was fetched."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.cache.forward import forward, prefill
from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.config import InfiniGenConfig, is_finite
from infinigen_kv.session.attach import Session, attach
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv_lab.kit.divergence import kl_divergence, log_probabilities
from infinigen_kv_lab.tuning.measurements import Measurement, Measurements, window_digest
from infinigen_kv_lab.tuning.windows import Window

COUNTING_LINK = "emulated:1000000"  # GB/s: counts what crosses, and keeps nobody waiting
SETTLING = 16  # steps of a window that are not counted: the resident set is still the prompt's


@dataclass(frozen=True, slots=True)
class Trial:
    """Means over the counted steps of all windows.

    ``kl`` is KL(full || selected) in nats per token, ``entries`` by layer those that crossed the
    link per step, ``link_bytes`` all bytes per step, ``fetched_share`` over the selecting layers.
    """

    kl: float
    entries: Mapping[int, float]
    link_bytes: float
    fetched_share: float

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trial:
        """Back from JSON; `ValueError`, `KeyError` or `TypeError` if it cannot be one."""
        numbers = [values[name] for name in ("kl", "link_bytes", "fetched_share")]
        entries = {int(layer): count for layer, count in dict(values["entries"]).items()}
        if not all(is_finite(each) for each in [*numbers, *entries.values()]):
            raise ValueError("not all are numbers")
        return cls(numbers[0], entries, numbers[1], numbers[2])

    @classmethod
    def mean(cls, trials: Sequence[Trial]) -> Trial:
        """Of windows of one length."""
        layers = sorted({layer for each in trials for layer in each.entries})
        return cls(
            statistics.fmean(each.kl for each in trials),
            {
                layer: statistics.fmean(each.entries.get(layer, 0.0) for each in trials)
                for layer in layers
            },
            statistics.fmean(each.link_bytes for each in trials),
            statistics.fmean(each.fetched_share for each in trials),
        )


class Trials:
    """Tries settings on the same windows.

    Parameters
    ----------
    model, calibration
        The model, not attached.
    windows
        Text; the full cache reads each once.
    kept
        What was measured before; None to measure everything.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        calibration: Calibration,
        windows: Sequence[Window],
        kept: Measurements | None = None,
    ) -> None:
        self.model = model
        self.calibration = calibration
        self.windows = list(windows)
        self.kept = kept or Measurements()
        self._digests = [window_digest(window) for window in windows]
        self._full: dict[int, Tensor] = {}

    def measure(self, config: InfiniGenConfig, storage: StorageConfig, *, every: int = 1) -> Trial:
        """Every so many windows under these settings, decode step by decode step.

        ``storage`` is what the settings are tuned for, its link one that only counts.
        """
        places = range(0, len(self.windows), every)
        return Trial.mean([self._window(place, config, storage) for place in places])

    def measurement(self, kind: str, place: int, **settings: Any) -> Measurement:
        """A measurement of one window under these settings."""
        return Measurement(kind, {"window": self._digests[place], **settings})

    def _window(self, place: int, config: InfiniGenConfig, storage: StorageConfig) -> Trial:
        # None stands for a number
        resident = storage.resident_budget_on(self.model.device)
        where = {**asdict(storage), "resident": resident}
        known = self.measurement("trial", place, config=asdict(config), storage=where)
        return self.kept.of(
            known, lambda: asdict(self._decode(place, config, storage)), Trial.from_dict
        )

    @torch.no_grad()
    def _decode(self, place: int, config: InfiniGenConfig, storage: StorageConfig) -> Trial:
        window = self.windows[place]
        kl: list[Tensor] = []
        recorder = FetchRecorder()
        with attach(self.model, self.calibration, config, storage) as session:
            full = self._read_in_full(session, place)
            with _prompted(session, window) as cache:
                start = min(SETTLING, window.decoded.numel() // 2)
                for at, token in enumerate(window.decoded):
                    if at == start:
                        cache.reset_statistics()
                        cache.recorder = recorder
                    logits = forward(self.model, token[None, None], cache)[0, -1]
                    if at >= start:
                        kl.append(kl_divergence(full[at], log_probabilities(logits)))
                selecting = cache.speculated_layers
                moved = cache.moved_entries
                link = cache.storage.link.statistics
        shares = recorder.fetched_by_layer
        return Trial(
            torch.stack(kl).mean().item(),
            {layer: count / len(kl) for layer, count in moved.items() if layer in selecting},
            (link.bytes_down + link.bytes_up) / len(kl),
            statistics.fmean(shares[layer] for layer in selecting),
        )

    def _read_in_full(self, session: Session, place: int) -> Tensor:
        """Log-probabilities ``(T, V)`` of the full cache, once for all settings."""
        if place not in self._full:
            window = self.windows[place]
            with _prompted(session, window, policy="ideal") as cache:
                logits = forward(self.model, window.decoded[None], cache)[0]
            self._full[place] = log_probabilities(logits)
        return self._full[place]


@contextmanager
def _prompted(
    session: Session, window: Window, policy: str = "infinigen"
) -> Iterator[InfiniGenCache]:
    """A cache that has read a window's prompt; closed afterwards."""
    tokens = window.prompt.numel() + window.decoded.numel()
    cache = session.new_cache(tokens=tokens, policy=policy)
    try:
        prefill(session, cache, window.prompt[None])
        yield cache
    finally:
        cache.close()
