"""What a policy is registered with: what it uses, what its layers do, and what that will hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.kernels.base import Kernels
from infinigen_kv.policies.base import Policy
from infinigen_kv.policies.rehearsal_layer import RehearsalLayer
from infinigen_kv.policies.settings import PolicySettings
from infinigen_kv.storage.config import StorageConfig


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer makes scores: ``softcap * tanh(q k scaling / softcap)``, or without the cap."""

    scaling: float
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """What the policy of one layer may be made of.

    ``rehearsal`` is there where the `Selecting` says that it rehearses.
    """

    scoring: Scoring
    config: InfiniGenConfig
    settings: PolicySettings
    kernels: Kernels
    rehearsal: RehearsalLayer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyShape:
    """The sizes that decide what the policy of one layer of one cache will hold.

    Parameters
    ----------
    rows, heads, kv_heads, head_dim, hidden_size
        B, H, H_kv, D and M.
    dtype
        Of keys and values.
    context, prompt_tokens, chunk
        Tokens per row in all, how many of them are prompt, and those of its longest forward.
    slots
        Tokens per row that the home has room for.
    rank
        Of the calibration's correction of the query projection.
    copied_query
        Numbers of the query projection where the model's own cannot be shared, else 0.
    shares_memory
        Whether the model's device and the host are one memory, so that a calibration is not copied.
    config, settings
        Of the selection.
    """

    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    dtype: torch.dtype
    context: int
    prompt_tokens: int
    chunk: int
    slots: int
    rank: int
    copied_query: int
    shares_memory: bool
    config: InfiniGenConfig
    settings: PolicySettings

    @property
    def new_tokens(self) -> int:
        """Tokens per row that are decoded."""
        return self.context - self.prompt_tokens

    @property
    def key_bytes(self) -> int:
        """Bytes of one key of one head."""
        return self.head_dim * self.dtype.itemsize

    @property
    def entries(self) -> int:
        """Tokens of all rows and KV heads."""
        return self.rows * self.kv_heads * self.context


@dataclass(frozen=True, slots=True)
class PolicyBytes:
    """Bytes on the device: ``partial_keys`` and ``state`` are what `Policy.nbytes` counts,
    ``rehearsal`` what is held to fit and to predict with, ``prefill`` what is held beyond that
    while a prompt is read.
    """

    partial_keys: int = 0
    state: int = 0
    rehearsal: int = 0
    prefill: int = 0


@dataclass(frozen=True, slots=True)
class Selecting:
    """How the layers of a cache select.

    Parameters
    ----------
    make
        The policy of one layer.
    planned
        What that policy will hold at most.
    rehearses
        Whether it needs a calibration, and a layer before its own.
    """

    make: Callable[[PolicyParts], Policy]
    planned: Callable[[PolicyShape], PolicyBytes]
    rehearses: bool = False


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Settings of a cache, and how its layers select; None: all attend in full."""

    config: InfiniGenConfig
    storage: StorageConfig
    selecting: Selecting | None = None

    @property
    def rehearses(self) -> bool:
        """Whether layers need a calibration."""
        return self.selecting is not None and self.selecting.rehearses


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """A policy as it is registered.

    Parameters
    ----------
    name, summary
        What it is called, and what it does, in a line.
    plan
        What a cache with it uses of a session's settings.
    takes_budget
        Whether `PolicySettings.budget` means anything to it.
    """

    name: str
    summary: str
    plan: Callable[[InfiniGenConfig, StorageConfig], CachePlan]
    takes_budget: bool = False
