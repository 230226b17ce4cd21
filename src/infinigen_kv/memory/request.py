"""What a plan is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from infinigen_kv.cache.forward import even_length
from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.calibration.run import DEFAULT_RANK
from infinigen_kv.checks import check_integer
from infinigen_kv.config import PROMPT_CHUNK, InfiniGenConfig
from infinigen_kv.errors import InputError
from infinigen_kv.memory.geometry import ModelGeometry, geometry_of
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.policies.registry import check_policy
from infinigen_kv.policies.settings import BUDGET, PolicySettings
from infinigen_kv.storage.config import StorageConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A run: model, tokens, and the settings of its caches.

    Parameters
    ----------
    geometry
        Of the model.
    context
        Tokens per row, prompt and new ones together.
    new_tokens
        How many of them are generated.
    rows
        Batch rows B.
    prompt_chunk
        Tokens of the prompt that one forward reads at most; None for all.
    config, storage
        As for `attach`.
    device
        Where the model runs; need not be there.
    policies
        One cache for each of these, all at the same time.
    budget
        As in `Session.new_cache`, for the policies that have one.
    rank, report
        Of the calibration; without one, the rank that `calibrate` would choose, and no layer that
        is hard to predict.

    Raises
    ------
    InputError
        If a value is outside its range.
    """

    geometry: ModelGeometry
    context: int
    new_tokens: int = 1
    rows: int = 1
    prompt_chunk: int | None = PROMPT_CHUNK
    config: InfiniGenConfig = field(default_factory=InfiniGenConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    policies: tuple[str, ...] = ("infinigen",)
    budget: float = BUDGET
    rank: int = DEFAULT_RANK
    report: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("new_tokens", "rows", "rank"):
            check_integer(name, getattr(self, name), 1)
        check_integer("context", self.context, self.new_tokens + 1)
        if self.prompt_chunk is not None:
            check_integer("prompt_chunk", self.prompt_chunk, 1)
        PolicySettings(budget=self.budget)
        if not self.policies:
            raise InputError("policies=() is not valid: it must name at least one")
        for policy in self.policies:
            check_policy(policy)

    @property
    def prompt_tokens(self) -> int:
        """Tokens per row that are given."""
        return self.context - self.new_tokens

    @property
    def chunk(self) -> int:
        """Tokens of the longest forward; see `cache.forward.piece_length`."""
        limits = [self.storage.limit(self.context), self.geometry.steady_positions]
        whole = any(limit is not None and self.prompt_tokens > limit for limit in limits)
        return even_length(self.prompt_tokens, None if whole else self.prompt_chunk)

    @property
    def unified(self) -> bool:
        """Whether device and host are the same memory."""
        return self.device.type == "cpu"


def model_request(model: PreTrainedModel, **settings: Any) -> PlanRequest:
    """For a model that is loaded; ``settings`` are fields of `PlanRequest`."""
    geometry = geometry_of(adapter_for(model))
    return PlanRequest(geometry=geometry, **{"device": model.device, **settings})


def calibration_fields(calibration: Calibration | None) -> dict[str, Any]:
    """``rank`` and ``report`` of a `PlanRequest`."""
    if calibration is None or not calibration.layers:
        return {}
    rank = max(layer.up.shape[0] for layer in calibration.layers.values())
    return {"rank": rank, "report": calibration.report}
