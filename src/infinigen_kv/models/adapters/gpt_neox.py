"""GPT-NeoX (Pythia): a projection fused head by head, and rotation of a part of each head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from infinigen_kv.models.adapters.base import Adapter
from infinigen_kv.models.adapters.layer_spec import LayerSpec

_QUERY, _KEY = 0, 1


class GPTNeoXAdapter(Adapter):
    """Each head's query, key and value rows lie side by side in ``query_key_value``."""

    family = "gpt_neox"
    model_types = ("gpt_neox",)

    attention_name = "attention"
    head_dim_name = "head_size"

    def query_weight(self, index: int) -> tuple[Tensor, Tensor | None]:
        """See `Adapter.query_weight`; a copy at every call, for the rows are interleaved."""
        return self._part(self.layers[index], _QUERY)

    def key_weight(self, index: int) -> tuple[Tensor, Tensor | None]:
        """See `Adapter.key_weight`; a copy at every call, for the rows are interleaved."""
        return self._part(self.layers[index], _KEY)

    def _projection_rows(self, spec: LayerSpec) -> dict[str, int]:
        return {"query_key_value": 3 * spec.num_heads * spec.head_dim}

    @staticmethod
    def _part(spec: LayerSpec, part: int) -> tuple[Tensor, Tensor | None]:
        module: Any = spec.module
        projection = module.query_key_value
        shape = (spec.num_heads, 3, spec.head_dim)
        weight = projection.weight.view(*shape, -1)[:, part].flatten(0, 1)
        if projection.bias is None:
            return weight, None
        return weight, projection.bias.view(shape)[:, part].flatten()
