"""A model's own attention weights, by Transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def own_weights(model: PreTrainedModel, ids: Tensor) -> list[np.ndarray[Any, Any]]:
    """``(H, N, N)`` float64 of tokens ``(N,)``, layer by layer."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        made = model(input_ids=ids[None], output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    return [layer[0].double().numpy() for layer in made]
