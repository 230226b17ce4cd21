"""Phi-3: one fused projection, queries first, then keys, then values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from infinigen_kv.models.adapters.base import Adapter
from infinigen_kv.models.adapters.layer_spec import LayerSpec


class Phi3Adapter(Adapter):
    """Llama's layout but for the fused projection; ``config.sliding_window`` holds everywhere."""

    family = "phi3"
    model_types = ("phi3",)

    @property
    def rereads_after(self) -> int | None:
        """See `Adapter.rereads_after`: there it turns from short rotary factors to long ones."""
        return getattr(self.config, "original_max_position_embeddings", None)

    def query_weight(self, index: int) -> tuple[Tensor, Tensor | None]:
        """See `Adapter.query_weight`: a view of the fused projection's first rows."""
        spec = self.layers[index]
        return self._rows(spec, 0, spec.num_heads)

    def key_weight(self, index: int) -> tuple[Tensor, Tensor | None]:
        """See `Adapter.key_weight`: a view of the rows after the query's."""
        spec = self.layers[index]
        return self._rows(spec, spec.num_heads, spec.num_heads + spec.num_kv_heads)

    def _is_sliding(self, index: int) -> bool:
        return self.config.sliding_window is not None

    def _projection_rows(self, spec: LayerSpec) -> dict[str, int]:
        return {"qkv_proj": (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim}

    @staticmethod
    def _rows(spec: LayerSpec, first: int, last: int) -> tuple[Tensor, Tensor | None]:
        module: Any = spec.module
        projection = module.qkv_proj
        rows = slice(first * spec.head_dim, last * spec.head_dim)
        bias = projection.bias
        return projection.weight[rows], None if bias is None else bias[rows]
