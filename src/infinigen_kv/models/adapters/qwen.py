"""Qwen2 (query and key biases) and Qwen3 (norms on the query's and key's heads)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from infinigen_kv.models.adapters.base import SLIDING_ATTENTION, Adapter
from infinigen_kv.models.adapters.layer_spec import LayerSpec


class Qwen2Adapter(Adapter):
    """Llama's layout with biases; ``config.layer_types`` tells which layers have a window."""

    family = "qwen2"
    model_types = ("qwen2",)

    def _is_sliding(self, index: int) -> bool:
        return self._layer_type(index) == SLIDING_ATTENTION


class Qwen3Adapter(Qwen2Adapter):
    """Qwen2 with a norm over each head's dimensions before the rotation."""

    family = "qwen3"
    model_types = ("qwen3",)

    def _normalise_query(self, spec: LayerSpec, heads: Tensor) -> Tensor:
        module: Any = spec.module
        normalised: Tensor = module.q_norm(heads)
        return normalised
