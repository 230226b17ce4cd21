"""Backward passes end at a cache, which keeps entries without the graph that made them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infinigen_kv.errors import CacheStateError


def without_gradient(output: Tensor, *inputs: Tensor) -> Tensor:
    """``output``, through which no backward pass to the ``inputs`` can go: it says why."""
    made: Tensor = _Stored.apply(output, *inputs)
    return made


class _Stored(torch.autograd.Function):
    """Attention to entries that a cache has stored without the graph that made them."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *inputs: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise CacheStateError(
            "a backward pass cannot go through tokens that were read on top of others in an "
            "InfiniGen cache, which keeps no graph of these: read the whole text in one forward, "
            "or give the model no cache of a session"
        )
