"""What an attached model calls: an attention function, and hooks around decoder and layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from infinigen_kv.attention.dense import dense_attention
from infinigen_kv.cache.contract import CACHE_NAMES, Attending, EngineCache, Owner, opaque
from infinigen_kv.cache.faults import device_error
from infinigen_kv.cache.masks import decoder_mask
from infinigen_kv.errors import CacheStateError, InputError
from infinigen_kv.models.soundness import check_known
from infinigen_kv.session.attached_attention import ATTENTION, AttachedAttention
from infinigen_kv.session.pieces import join_pieces, run_pieces


class SessionHook:
    """A hook of a session; the copy of a module that carries it gets one that does nothing."""

    def __init__(self, call: Callable[..., Any], *given: Any) -> None:
        self._call = call
        self._given = given

    @opaque
    def __call__(self, module: nn.Module, *args: Any) -> Any:
        return self._call(*self._given, module, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (no_hook,)


def no_hook(*seen: Any) -> None:
    """What a copied model has in place of a hook."""


def set_attention(session: Owner, undo: ExitStack) -> None:
    """Route the model's attention here, and its masks to booleans."""
    AttentionInterface.register(ATTENTION, infinigen_attention)
    AttentionMaskInterface.register(ATTENTION, decoder_mask)
    name = AttachedAttention.of(session.model.config)
    name.decoders.append(session.adapter.decoder)
    undo.callback(_unset_attention, session, name)
    session.model.set_attn_implementation(name)


def _unset_attention(session: Owner, name: AttachedAttention) -> None:
    name.decoders[:] = [each for each in name.decoders if each is not session.adapter.decoder]
    if not name.decoders:
        session.model.set_attn_implementation(name.before)


def add_hooks(session: Owner, undo: ExitStack) -> None:
    """Hook the decoder and the attention of every layer."""
    decoder = session.adapter.decoder
    # each on its own line: one that cannot be added must not leave an earlier one behind
    note = session.model.register_forward_pre_hook(
        SessionHook(_note_drafts, session), with_kwargs=True
    )
    undo.callback(note.remove)
    divide = decoder.register_forward_pre_hook(SessionHook(_divide), with_kwargs=True)
    undo.callback(divide.remove)
    begin, end = SessionHook(_begin_forward, session), SessionHook(_end_forward)
    before = decoder.register_forward_pre_hook(begin, with_kwargs=True)
    undo.callback(before.remove)
    after = decoder.register_forward_hook(end, with_kwargs=True, always_call=True)
    undo.callback(after.remove)
    join = decoder.register_forward_hook(SessionHook(_join), with_kwargs=True, always_call=True)
    undo.callback(join.remove)
    for spec in session.adapter.layers:
        hook = SessionHook(_attention_input, session, spec.index)
        undo.callback(spec.module.register_forward_pre_hook(hook, with_kwargs=True).remove)


@opaque
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


def _note_drafts(
    session: Owner, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Before the model runs: assisted decoding asks for the logits of its drafts, and of the token
    before them. Where a draft makes the model read the whole text anew, it stays one forward.
    """
    named = _by_name(model, args, kwargs)
    cache, wanted, shown = _find_cache(named), named.get("logits_to_keep"), _shown(named)
    if cache is None or shown is None or not isinstance(wanted, int):
        return
    end, limit = cache.get_seq_length() + shown.shape[1], session.adapter.rereads_after
    if limit is None or not end - (wanted - 1) <= limit < end:
        cache.expect_verification(shown.shape[1], wanted - 1)


def _divide(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before the decoder runs: run it for the pieces that have to come first."""
    named = _by_name(decoder, args, kwargs)
    cache, shown = _find_cache(named), _shown(named)
    if cache is None or shown is None or shown.shape[1] < 2:
        return None
    last = run_pieces(decoder, cache, named, shown.shape[1])
    return None if last is None else ((), last)


def _join(decoder: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """After the decoder ran, or failed: put the pieces together."""
    cache = _find_cache(_by_name(decoder, args, kwargs))
    return None if cache is None else join_pieces(cache, output)


def _shown(named: dict[str, Any]) -> Tensor | None:
    """The new tokens, ``(B, Q)`` or ``(B, Q, M)``."""
    embedded: Tensor | None = named.get("inputs_embeds")
    return named.get("input_ids") if embedded is None else embedded


def _begin_forward(
    session: Owner, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Before the decoder runs: tell the cache what is coming."""
    named = _by_name(decoder, args, kwargs)
    shown = _shown(named)
    _check_outputs(decoder, named)
    cache = _find_cache(named)
    if cache is None:
        return
    _check_ours(session, cache)
    if named.get("use_cache") is False:
        raise InputError(
            "use_cache=False goes with no cache: every step would read the whole text again. "
            "Leave it out, or set use_cache=True where it comes from (the arguments, or the "
            "generation config)"
        )
    if shown is None or shown.shape[1] == 0:
        raise InputError("the prompt is empty: give at least one token")
    rows, queries = shown.shape[:2]
    start = cache.get_seq_length()
    if start == 0:  # later tokens are left to the model: finished work must not be lost
        session.check_length(queries)
        if named.get("input_ids") is not None:
            check_known(named["input_ids"], session.model)
    positions = named.get("position_ids")
    if positions is None:
        positions = torch.arange(start, start + queries, device=shown.device)[None]
    cache.begin_forward(
        queries=queries,
        rows=rows,
        attention_mask=named.get("attention_mask"),
        position_ids=positions,
    )


def _check_ours(session: Owner, cache: EngineCache) -> None:
    if cache.owner is not session:
        raise CacheStateError(
            "this cache was made for another model or an earlier attach: make one with "
            "session.new_cache() of the session that is attached now"
        )
    if session.model.config._attn_implementation != ATTENTION:
        raise CacheStateError(
            f"the model's attention is {session.model.config._attn_implementation!r} now, which "
            "cannot read this cache: change it before attach(...), which sets its own"
        )


def _attention_input(
    session: Owner,
    index: int,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
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
