"""What the registered baselines have in common: a fixed budget, and state of so many bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.policies.base import Policy
from infinigen_kv.policies.entry import (
    CachePlan,
    PolicyBytes,
    PolicyEntry,
    PolicyParts,
    PolicyShape,
    Selecting,
)
from infinigen_kv.storage.config import StorageConfig

EVICTING_STATES = 2  # an `EvictingPolicy` keeps the state before the latest forward too


def budgeted(
    name: str,
    summary: str,
    make: Callable[[PolicyParts], Policy],
    planned: Callable[[PolicyShape], PolicyBytes],
) -> PolicyEntry:
    """A policy that attends to a fixed share of the tokens, under `PolicySettings.budget`.

    It keeps nothing resident and ignores a capacity, which is InfiniGen's own way to limit a home.
    """

    def plan(config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
        own = replace(storage, capacity=None, evict="counter", resident=0, resident_layers=())
        return CachePlan(config, own, Selecting(make, planned))

    return PolicyEntry(name, summary, plan, takes_budget=True)


def no_state(shape: PolicyShape) -> PolicyBytes:
    """Of a policy that decides by positions alone."""
    return PolicyBytes()


def survivor_bytes(shape: PolicyShape, fact_bytes: int) -> PolicyBytes:
    """Of an `EvictingPolicy`: facts of all tokens at first, later a position of each survivor;
    and the facts of all at the prompt's end, which outlast them.
    """
    per_token = EVICTING_STATES * (fact_bytes + torch.long.itemsize) + fact_bytes
    return PolicyBytes(state=per_token * shape.entries)
