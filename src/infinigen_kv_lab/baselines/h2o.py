"""H2O: heavy hitters and recent tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from infinigen_kv.policies.entry import PolicyBytes, PolicyParts, PolicyShape, Scoring
from infinigen_kv.policies.settings import PolicySettings
from infinigen_kv_lab.baselines.entries import budgeted, survivor_bytes
from infinigen_kv_lab.baselines.evicting import EvictingPolicy
from infinigen_kv_lab.baselines.scoring import Attention


class H2OPolicy(EvictingPolicy):
    """Half of the budget for the tokens of the highest accumulated attention, half for recent ones.

    Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
    Language Models", NeurIPS 2023 (arXiv 2306.14048), section 4, Algorithm 1: per head, add up the
    attention that each token gets, prompt included, and evict the one with the least sum outside
    of the recent window.

    Departures:

    - A KV head adds up the attention of all query heads of its group, since its entries serve all.
    - The budget is a share of the tokens so far; the authors fix the number at the prompt's end.
    - The survivors live in the home and cross the link at each step, as InfiniGen's authors run
      H2O on FlexGen.
    """

    def __init__(self, scoring: Scoring, settings: PolicySettings) -> None:
        super().__init__(scoring, settings, facts=1, dtype=torch.float32)

    def note(self, facts: Tensor, attention: Attention) -> None:
        facts[..., 0] += attention.weights.sum(dim=2)

    def worth(self, facts: Tensor, positions: Tensor) -> Tensor:
        return facts[..., 0]

    def window(self, budget: int) -> int:
        return budget - budget // 2


def h2o_policy(parts: PolicyParts) -> H2OPolicy:
    """The policy of one layer."""
    return H2OPolicy(parts.scoring, parts.settings)


def h2o_bytes(shape: PolicyShape) -> PolicyBytes:
    """A sum for each token."""
    return survivor_bytes(shape, torch.float32.itemsize)


H2O = budgeted(
    "h2o",
    "a fixed budget: half recent tokens, half those with the most attention so far",
    h2o_policy,
    h2o_bytes,
)
