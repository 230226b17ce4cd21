"""What the engine knows of one attention layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer of a model.

    Attributes
    ----------
    index
        Layer index as the model passes it to ``cache.cache.update``.
    module
        The attention module. Its forward receives the hidden states after the layer's norm.
    num_heads, num_kv_heads, head_dim
        H, H_kv and D.
    scaling
        What the model passes as ``scaling`` to its attention function.
    softcap
        Bound of the scaled scores, ``softcap * tanh(score / softcap)``; None where there is none.
    is_sliding
        The layer attends within a window only.
    """

    index: int
    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    softcap: float | None
    is_sliding: bool
