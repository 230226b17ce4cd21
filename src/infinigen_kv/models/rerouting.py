"""A model's attention through a function of one's own, for measurements without a cache of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from infinigen_kv.models.adapters.base import Adapter
from infinigen_kv.models.adapters.layer_spec import LayerSpec

ATTENTION = "infinigen_kv_measuring"

Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor | None, float, float | None], Tensor]
"""``(layer, query, keys, values, mask, scaling, softcap)`` to the output, shapes as in
`attention.dense.dense_attention`."""


@contextmanager
def rerouted(model: PreTrainedModel, attend: Attend) -> Iterator[None]:
    """Inside the block every layer attends by ``attend``. The model may be attached."""

    def function(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        layer = int(module.layer_idx)
        return attend(layer, query, key, value, attention_mask, scale, softcap), None

    AttentionInterface.register(ATTENTION, function)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(ATTENTION)
        with torch.compiler.set_stance("force_eager"):  # `attend` keeps what it sees
            yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def reading_inputs(adapter: Adapter, keep: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Inside the block ``keep`` gets each layer's number and what its attention is about to read,
    ``(B, N, M)``.
    """

    def hooked(spec: LayerSpec) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(spec.index, adapter.attention_input(args, kwargs))

        return hook

    with ExitStack() as undo:
        # code that was compiled before may pass over hooks that are new
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        for spec in adapter.layers:
            handle = spec.module.register_forward_pre_hook(hooked(spec), with_kwargs=True)
            undo.callback(handle.remove)
        yield
