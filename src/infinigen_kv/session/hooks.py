"""What an attached model calls: an attention function, and hooks around decoder and layers."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from infinigen_kv.attention.dense import dense_attention
from infinigen_kv.cache.contract import Attending, EngineCache
from infinigen_kv.cache.faults import device_error
from infinigen_kv.cache.masks import decoder_mask
from infinigen_kv.errors import CacheStateError, InputError

if TYPE_CHECKING:
    from infinigen_kv.session.attach import Session

ATTENTION = "infinigen_kv"
CACHE_NAMES = ("cache", "past_key_values", "layer_past")  # by release and family


def set_attention(model: PreTrainedModel, undo: ExitStack) -> None:
    """Route the model's attention here, and its masks to booleans."""
    AttentionInterface.register(ATTENTION, infinigen_attention)
    AttentionMaskInterface.register(ATTENTION, decoder_mask)
    before = model.config._attn_implementation
    undo.callback(model.set_attn_implementation, before)
    model.set_attn_implementation(ATTENTION)


def add_hooks(session: Session, undo: ExitStack) -> None:
    """Hook the decoder and the attention of every layer."""
    decoder = session.adapter.decoder
    # each on its own line: one that cannot be added must not leave an earlier one behind
    before = decoder.register_forward_pre_hook(partial(_begin_forward, session), with_kwargs=True)
    undo.callback(before.remove)
    after = decoder.register_forward_hook(_end_forward, with_kwargs=True, always_call=True)
    undo.callback(after.remove)
    for spec in session.adapter.layers:

        def hook(
            module: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            index: int = spec.index,
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            return _attention_input(session, index, args, kwargs)

        undo.callback(spec.module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def infinigen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    offloaded_layer: Attending | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """A Transformers attention function: the offloaded layer's if there is one, else plain."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if offloaded_layer is not None:
        try:
            output = offloaded_layer.attend(
                query, key, value, attention_mask, scaling=scale, softcap=softcap
            )
        except RuntimeError as error:
            fault = device_error(error, query.device)
            if fault is None:
                raise
            raise fault from error
    else:
        output = dense_attention(
            query, key, value, scaling=scale, softcap=softcap, mask=attention_mask, dropout=dropout
        )
    return output, None


def _begin_forward(
    session: Session, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Before the decoder runs: tell the cache what is coming."""
    kwargs = _by_name(decoder, args, kwargs)
    _check_outputs(decoder, kwargs)
    cache = _find_cache(kwargs)
    if cache is None:
        return
    if cache.owner is not session:
        raise CacheStateError(
            "this cache was made for another model or an earlier attach: make one with "
            "session.new_cache() of the session that is attached now"
        )
    shown = kwargs.get("inputs_embeds")
    shown = kwargs.get("input_ids") if shown is None else shown
    if shown is None or shown.shape[1] == 0:
        raise InputError("the prompt is empty: give at least one token")
    rows, queries = shown.shape[:2]
    start = cache.get_seq_length()
    if start == 0:  # later tokens are left to the model: finished work must not be lost
        session.check_length(queries)
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = torch.arange(start, start + queries, device=shown.device)[None]
    cache.begin_forward(
        queries=queries,
        rows=rows,
        attention_mask=kwargs.get("attention_mask"),
        position_ids=positions,
    )


def _attention_input(
    session: Session, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a layer's attention: rehearse its followers, hand it its own cache layer."""
    cache = _find_cache(kwargs)
    if cache is None:
        return None
    hidden = session.adapter.attention_input(args, kwargs)
    try:
        layer = cache.attention_input(index, hidden)
    except RuntimeError as error:
        fault = device_error(error, hidden.device)
        if fault is None:
            raise
        raise fault from error
    return None if layer is None else (args, {**kwargs, "offloaded_layer": layer})


def _end_forward(decoder: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """After the decoder ran, or failed: then there is no output."""
    cache = _find_cache(_by_name(decoder, args, kwargs))
    if cache is not None:
        cache.end_forward(finished=output is not None)


def _check_outputs(decoder: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise `InputError` where attention weights are asked for, which nobody makes here."""
    config: Any = decoder.config
    if kwargs.get("output_attentions", getattr(config, "output_attentions", False)):
        raise InputError(
            "output_attentions=True is not valid on an attached model, whose attention makes no "
            "matrix of weights: leave it out (it may be in the model's configuration), or ask the "
            "model outside `attach`, with attn_implementation='eager'"
        )


def _by_name(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The decoder's arguments by name, those that were passed by position included."""
    if not args:
        return kwargs
    return {**inspect.signature(decoder.forward).bind_partial(*args).arguments, **kwargs}


def _find_cache(kwargs: dict[str, Any]) -> EngineCache | None:
    for name in CACHE_NAMES:
        if isinstance(kwargs.get(name), EngineCache):
            return kwargs[name]
    return None
