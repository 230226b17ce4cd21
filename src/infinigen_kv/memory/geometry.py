"""The sizes of a model that a plan needs, read without its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from infinigen_kv.models.adapters import Adapter, adapter_for
from infinigen_kv.models.loading import model_shapes


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One attention layer. Fields as in `models.adapters.LayerSpec`.

    ``copied_query`` are the numbers of the query projection where the adapter cannot share the
    model's own (`Adapter.query_weight`), else 0.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_sliding: bool
    has_softcap: bool
    copied_query: int


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """A model's sizes; M is the hidden size, ``mlp_size`` the inner width of an MLP.

    ``max_positions`` and ``steady_positions`` are those of `Adapter`; ``window`` is what sliding
    layers attend to, in tokens; None where there are none.
    """

    layers: tuple[LayerGeometry, ...]
    dtype: torch.dtype
    hidden_size: int
    mlp_size: int
    vocabulary: int
    max_positions: int | None
    steady_positions: int | None
    window: int | None
    weight_bytes: int

    def with_dtype(self, dtype: torch.dtype) -> ModelGeometry:
        """The same model with weights of another type."""
        weights = self.weight_bytes * dtype.itemsize // self.dtype.itemsize
        return replace(self, dtype=dtype, weight_bytes=weights)


def geometry_of(adapter: Adapter) -> ModelGeometry:
    """Sizes of an adapter's model, loaded or on the ``meta`` device."""
    model = adapter.model
    tensors = [*model.parameters(), *model.buffers()]  # tied weights once
    projections = [each for each in adapter.decoder.modules() if isinstance(each, nn.Linear)]
    sliding = any(spec.is_sliding for spec in adapter.layers)
    return ModelGeometry(
        layers=tuple(_layer(adapter, index) for index in range(len(adapter.layers))),
        dtype=model.dtype,
        hidden_size=adapter.hidden_size,
        mlp_size=max(each.in_features for each in projections),
        vocabulary=int(model.config.vocab_size),
        max_positions=adapter.max_positions,
        steady_positions=adapter.steady_positions,
        window=int(model.config.sliding_window) if sliding else None,
        weight_bytes=sum(each.nbytes for each in tensors),
    )


def read_geometry(
    name: str, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> ModelGeometry:
    """Sizes of the model of that name, from its configuration; parameters as in `load_model`.

    Raises
    ------
    InputError
        The configuration cannot be found or read.
    UnsupportedModelError
        The model's family has no adapter.
    """
    model = model_shapes(name, dtype=dtype, trust_remote_code=trust_remote_code)
    return geometry_of(adapter_for(model, shapes_only=True))


@torch.no_grad()
def _layer(adapter: Adapter, index: int) -> LayerGeometry:
    spec = adapter.layers[index]
    weight, _ = adapter.query_weight(index)
    shared = isinstance(weight, nn.Parameter) or weight._is_view()
    return LayerGeometry(
        index=spec.index,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        is_sliding=spec.is_sliding,
        has_softcap=spec.softcap is not None,
        copied_query=0 if shared else weight.numel(),
    )
