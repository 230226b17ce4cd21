"""OPT: learned positions, and the score scaling folded into the query."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from infinigen_kv.models.adapters.base import Adapter


class OPTAdapter(Adapter):
    """Llama's layout without rotary positions; the attention function's own scaling is 1."""

    family = "opt"
    model_types = ("opt",)

    is_rotary = False

    def finish_query(
        self, index: int, query: Tensor, rotary: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """See `Adapter.finish_query`; the result carries the factor D ** -0.5."""
        module: Any = self.layers[index].module
        return super().finish_query(index, query * module.scaling, rotary)

    def _scaling(self, module: Any) -> float:
        return 1.0
