"""A layer's query, predicted from the previous layer's attention input."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from infinigen_kv.calibration.artefact import LayerCalibration
from infinigen_kv.kernels.base import AddLowRank, Kernels
from infinigen_kv.kernels.reference import TorchKernels
from infinigen_kv.models.adapters.base import Adapter
from infinigen_kv.policies.step import Step


class QueryPredictor:
    """``x -> query`` of layer ``index`` as its attention would use it, RoPE included.

    Without a correction this is the paper's rehearsal: the layer's own weights on the previous
    layer's input.

    Parameters
    ----------
    fitted
        Of the layer; None for the paper's rehearsal.
    kernels
        Who adds the correction; None for PyTorch.
    """

    def __init__(
        self,
        adapter: Adapter,
        index: int,
        fitted: LayerCalibration | None,
        kernels: Kernels | None = None,
    ) -> None:
        self._adapter = adapter
        self._index = index
        self._weight, self._bias = adapter.query_weight(index)
        self._correct: AddLowRank | None = None
        if fitted is not None:
            down, bias, up = (
                part.to(self._weight).contiguous()
                for part in (fitted.down[:-1].T, fitted.down[-1], fitted.up)
            )
            self._correct = (kernels or TorchKernels()).low_rank(down, bias, up)

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """``(B, Q, M)`` to ``(B, H, Q, D)``."""
        hidden = hidden.to(self._weight.device)
        query = F.linear(hidden, self._weight, self._bias)
        if self._correct is not None:
            query = self._correct(query, hidden)
        rotary = step.rotary(self._adapter, self._index, hidden)
        return self._adapter.finish_query(self._index, query, rotary)
