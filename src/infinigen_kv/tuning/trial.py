"""The engine's own decode steps on windows of text: KL, entries that crossed, what was fetched."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infinigen_kv.cache import InfiniGenCache
from infinigen_kv.calibration import Calibration
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.generate import forward, prefill
from infinigen_kv.recorder import FetchRecorder
from infinigen_kv.session import Session, attach
from infinigen_kv.storage_config import StorageConfig
from infinigen_kv.tuning.windows import Window

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


class Trials:
    """Tries settings on the same windows.

    Parameters
    ----------
    model, calibration
        The model, not attached.
    windows
        Text; the full cache reads it once.
    storage
        What the settings are tuned for: its resident set and its codec. The link only counts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        calibration: Calibration,
        windows: Sequence[Window],
        storage: StorageConfig,
    ) -> None:
        self._model = model
        self._calibration = calibration
        self._windows = list(windows)
        self._storage = storage
        self._full: list[Tensor] = []

    @torch.no_grad()
    def measure(self, config: InfiniGenConfig) -> Trial:
        """The windows under these settings, decode step by decode step."""
        kl: list[Tensor] = []
        entries: Counter[int] = Counter()
        link_bytes = 0
        recorder = FetchRecorder()
        with attach(self._model, self._calibration, config, self._storage) as session:
            self._read_in_full(session)
            for window, full in zip(self._windows, self._full, strict=True):
                with _prompted(session, window) as cache:
                    start = min(SETTLING, window.decoded.numel() // 2)
                    for at, token in enumerate(window.decoded):
                        if at == start:
                            cache.reset_statistics()
                            cache.recorder = recorder
                        logits = forward(self._model, token[None, None], cache)[0, -1]
                        if at >= start:
                            kl.append(_divergence(full[at], logits.float().log_softmax(-1)))
                    entries.update(cache.moved_entries)
                    link = cache.storage.link.statistics
                    link_bytes += link.bytes_down + link.bytes_up
                    selecting = cache.speculated_layers
        shares = recorder.fetched_by_layer
        return Trial(
            torch.stack(kl).mean().item(),
            {layer: count / len(kl) for layer, count in entries.items() if layer in selecting},
            link_bytes / len(kl),
            statistics.fmean(shares[layer] for layer in selecting),
        )

    def _read_in_full(self, session: Session) -> None:
        """Log-probabilities ``(T, V)`` of the full cache, once for all settings."""
        for window in self._windows[len(self._full) :]:
            with _prompted(session, window, policy="ideal") as cache:
                logits = forward(self._model, window.decoded[None], cache)[0]
            self._full.append(logits.float().log_softmax(-1))


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


def _divergence(full: Tensor, ours: Tensor) -> Tensor:
    return (full.exp() * (full - ours)).sum()
