"""What a verdict rests on: plain numbers about a model and its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from infinigen_kv.config import InfiniGenConfig

NAN = math.nan


@dataclass(frozen=True, slots=True)
class LayerEvidence:
    """One layer whose entries are selected; NaN stands for what was not measured.

    Shares are in [0, 1], means over queries and heads.

    Attributes
    ----------
    layer
        Its index.
    similarity
        Cosine of its attention input and the previous layer's, the mean over tokens.
    unexplained, own_weights
        Share of the query's power that the prediction misses, as the engine makes it and with the
        layer's own weights alone. Also in a calibration's report, over the calibration text.
    calibration_unexplained
        What the calibration's report says.
    recall, recall_true_query, recall_all_dimensions
        Of the tokens chosen beyond the always-kept ones, the share that the true scores would have
        chosen: the engine's, and with one source of error left (`evals.speculation`).
    coverage, coverage_true_query, coverage_all_dimensions, best_coverage
        Attention mass on the chosen tokens, and on as many chosen by the true scores.
    concentration
        Share of the context that carries 0.9 of the attention mass.
    fetched, wanted
        Share of the cached tokens that is chosen, and that would be without ``max_fetch``.
    harm
        KL(full || selected) of the next-token distribution where this layer alone selects, nats.
    head_coverage
        ``coverage`` of each query head.
    """

    layer: int
    similarity: float = NAN
    unexplained: float = NAN
    own_weights: float = NAN
    calibration_unexplained: float = NAN
    recall: float = NAN
    recall_true_query: float = NAN
    recall_all_dimensions: float = NAN
    coverage: float = NAN
    coverage_true_query: float = NAN
    coverage_all_dimensions: float = NAN
    best_coverage: float = NAN
    concentration: float = NAN
    fetched: float = NAN
    wanted: float = NAN
    harm: float = NAN
    head_coverage: tuple[float, ...] = ()

    @property
    def lost(self) -> float:
        """Attention mass on tokens that are not chosen."""
        return 1 - self.coverage

    @property
    def missed(self) -> float:
        """Attention mass that as many tokens, chosen by the true scores, would add."""
        return self.best_coverage - self.coverage

    @property
    def worst_head(self) -> tuple[int, float]:
        """The query head that loses most, and its coverage; ``(-1, NaN)`` if unknown."""
        known = [each for each in enumerate(self.head_coverage) if not math.isnan(each[1])]
        return min(known, key=lambda each: each[1], default=(-1, NAN))


@dataclass(frozen=True, slots=True)
class ResidentTrial:
    """What keeping layers on the device whole changes, measured on the same tokens.

    ``kl`` is KL(full || selected) in nats with all layers selecting, ``kl_kept`` with ``layers``
    attended to in full. Where several windows were read, the tokens are not those by which the
    layers were chosen.
    """

    layers: tuple[int, ...]
    kl: float
    kl_kept: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about a model under one configuration.

    Attributes
    ----------
    config
        The settings that were measured.
    layers
        Those that select, in order.
    kl
        KL(full || selected) of the next-token distribution, nats per token; NaN if not measured.
    best_kl
        The same with as many tokens chosen by the true scores (the policy ``oracle``).
    fetched
        Share of the cached tokens that steps attend to, mean over ``layers``; NaN if unknown.
    full_layers
        Layers with full attention that never select (layer 0).
    trial
        Layers kept on the device whole, tried.
    """

    config: InfiniGenConfig
    layers: tuple[LayerEvidence, ...]
    kl: float = NAN
    best_kl: float = NAN
    fetched: float = NAN
    full_layers: tuple[int, ...] = field(default=(0,))
    trial: ResidentTrial | None = None


def known_mean(values: list[float]) -> float:
    """Mean of the values that are not NaN; NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else NAN
