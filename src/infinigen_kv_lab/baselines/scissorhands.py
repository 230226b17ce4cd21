"""Scissorhands: what was important for the last queries stays important."""

from __future__ import annotations

import torch
from torch import Tensor

from infinigen_kv.policies.entry import PolicyBytes, PolicyParts, PolicyShape, Scoring
from infinigen_kv.policies.settings import PolicySettings
from infinigen_kv_lab.baselines.entries import budgeted, survivor_bytes
from infinigen_kv_lab.baselines.evicting import EvictingPolicy
from infinigen_kv_lab.baselines.history import ones, push, words_for
from infinigen_kv_lab.baselines.scoring import Attention


class ScissorhandsPolicy(EvictingPolicy):
    """Evict the tokens that got less than an average share from most of the last queries.

    Source: Liu et al., "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM
    KV Cache Compression at Test Time", NeurIPS 2023 (arXiv 2305.17118), section 4, Algorithm 2: per
    head, count for each token in how many of the queries of a history window it got less than 1/t
    of the attention, t tokens being there, and drop those with the highest counts; the recent
    window is never dropped.

    Departures:

    - One token is dropped when one is too many; the authors drop half of the buffer when it is
      full. So the whole budget is in use at every step.
    - A KV head compares the attention of its whole group with the average of that.
    - The budget is a share of the tokens so far, and also limits the recent window.
    - Of tokens with the same count the oldest goes first; the source leaves that open.
    """

    def __init__(self, scoring: Scoring, settings: PolicySettings) -> None:
        words = words_for(settings.history)
        super().__init__(scoring, settings, facts=words, dtype=torch.int64)

    @property
    def last_queries(self) -> int:
        return self._settings.history

    def note(self, facts: Tensor, attention: Attention) -> None:
        low = attention.seen & (attention.weights < attention.average)  # (B, H_kv, Q, n)
        facts.copy_(push(facts, low, self._settings.history))

    def worth(self, facts: Tensor, positions: Tensor) -> Tensor:
        # exact in float64: counts and positions have 53 bits together
        return positions - ones(facts).double() * 2**32

    def window(self, budget: int) -> int:
        return min(self._settings.recent, budget)


def _policy(parts: PolicyParts) -> ScissorhandsPolicy:
    return ScissorhandsPolicy(parts.scoring, parts.settings)


def _planned(shape: PolicyShape) -> PolicyBytes:
    return survivor_bytes(shape, words_for(shape.settings.history) * torch.long.itemsize)


SCISSORHANDS = budgeted(
    "scissorhands",
    "a fixed budget: the tokens that most of the last queries found important",
    _policy,
    _planned,
)
