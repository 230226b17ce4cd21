"""A layer's query, predicted from the previous layer's attention input."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from infinigen_kv.adapters.base import Adapter
from infinigen_kv.calibration import LayerCalibration
from infinigen_kv.step import Step


class QueryPredictor:
    """``x -> query`` of layer ``index`` as its attention would use it, RoPE included.

    Without a correction this is the paper's rehearsal: the layer's own weights on the previous
    layer's input.
    """

    def __init__(self, adapter: Adapter, index: int, fitted: LayerCalibration | None) -> None:
        self._adapter = adapter
        self._index = index
        self._weight, self._bias = adapter.query_weight(index)
        self._down: Tensor | None = None
        if fitted is not None:
            self._down = fitted.down[:-1].T.to(self._weight).contiguous()  # (r, M)
            self._down_bias = fitted.down[-1].to(self._weight)  # (r,)
            self._up = fitted.up.T.to(self._weight).contiguous()  # (H * D, r)

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """``(B, Q, M)`` to ``(B, H, Q, D)``."""
        hidden = hidden.to(self._weight.device)
        query = F.linear(hidden, self._weight, self._bias)
        if self._down is not None:
            query = query + F.linear(F.linear(hidden, self._down, self._down_bias), self._up)
        rotary = step.rotary(self._adapter, self._index, hidden)
        return self._adapter.finish_query(self._index, query, rotary)
