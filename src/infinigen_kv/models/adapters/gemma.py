"""Gemma 2 (capped scores) and Gemma 3 (head norms, one rotary base for each kind of layer)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from infinigen_kv.models.adapters.base import SLIDING_ATTENTION, Adapter
from infinigen_kv.models.adapters.layer_spec import LayerSpec


class Gemma2Adapter(Adapter):
    """Llama's layout with soft-capped scores and sliding layers among full ones."""

    family = "gemma2"
    model_types = ("gemma2",)

    def _is_sliding(self, index: int) -> bool:
        return self._layer_type(index) == SLIDING_ATTENTION

    def _softcap(self, module: Any) -> float | None:
        cap = module.attn_logit_softcapping
        return None if cap is None else float(cap)


class Gemma3Adapter(Adapter):
    """Text models of Gemma 3.

    They carry ``attn_logit_softcapping`` in their configuration but do not pass it to the
    attention function, so that no score is capped.
    """

    family = "gemma3"
    model_types = ("gemma3_text",)

    def _is_sliding(self, index: int) -> bool:
        return self._layer_type(index) == SLIDING_ATTENTION

    def _normalise_query(self, spec: LayerSpec, heads: Tensor) -> Tensor:
        module: Any = spec.module
        normalised: Tensor = module.q_norm(heads)
        return normalised
