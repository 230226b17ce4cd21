"""What the policies that InfiniGen is compared with keep for themselves, at most."""

from __future__ import annotations

import torch

from infinigen_kv.memory.geometry import LayerGeometry
from infinigen_kv.memory.request import PlanRequest
from infinigen_kv.policies.settings import PolicySettings
from infinigen_kv.storage.homes.buffer import GROWTH
from infinigen_kv_lab.baselines.history import words_for

STATES = 2  # an `EvictingPolicy` keeps the state before the latest forward too


def policy_state(policy: str, layer: LayerGeometry, request: PlanRequest) -> int:
    """Bytes of one layer of a policy that `layers.LayerPlanner` does not know in detail.

    Those that evict begin with facts of all tokens, and later have a position of each survivor.
    """
    settings, long = PolicySettings(), torch.long.itemsize
    key = layer.head_dim * request.geometry.dtype.itemsize
    evicting = {
        "h2o": torch.float32.itemsize,
        "paging-h2o": torch.float32.itemsize,
        "scissorhands": words_for(settings.history) * long,
    }
    per_token = 0.0
    if policy in evicting:
        # and the facts of all tokens at the prompt's end, which outlast them
        per_token = STATES * (evicting[policy] + long) + evicting[policy]
    elif policy == "quest":  # the least and the largest numbers of every page
        per_token = GROWTH * 2 * key / settings.page_tokens
    elif policy == "oracle":  # all keys
        per_token = GROWTH * key
    tokens = request.rows * layer.num_kv_heads * request.context
    return int(per_token * tokens)
