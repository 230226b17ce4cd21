"""A forward that a decode step has to be told apart in is made in pieces.

Assisted decoding hands the model a prompt and the first drafts in one forward, and drafts across a
refit in another. Token by token the drafts would select, and those after the refit with the new
fit. So a hook before the decoder runs it for all pieces but the last one, which the forward itself
becomes, and a hook after it puts the outputs together.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from infinigen_kv.cache.contract import EngineCache
from infinigen_kv.errors import CacheStateError, HomeError

BY_TOKEN = ("input_ids", "token_type_ids", "position_ids", "cache_position")  # on the last axis


def divisible(named: dict[str, Any]) -> bool:
    """Whether a decoder's arguments can be cut: there is no mask that a caller made himself."""
    mask = named.get("attention_mask")
    whole = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)
    return whole and named.get("return_dict") is not False


def piece_of(named: dict[str, Any], start: int, first: int, end: int) -> dict[str, Any]:
    """The arguments for the new tokens from ``first`` to ``end``, of those on ``start`` others."""
    piece = dict(named)
    for name in BY_TOKEN:
        if isinstance(named.get(name), Tensor):
            piece[name] = named[name][..., first:end]
    if named.get("inputs_embeds") is not None:
        piece["inputs_embeds"] = named["inputs_embeds"][:, first:end]
    if named.get("attention_mask") is not None:
        piece["attention_mask"] = named["attention_mask"][:, : start + end]
    return piece


def run_pieces(
    decoder: nn.Module, cache: EngineCache, named: dict[str, Any], queries: int
) -> dict[str, Any] | None:
    """Run the decoder for all pieces but the last one; its arguments, None where there is only one.

    Where a piece fails, the tokens of those before it are taken back.
    """
    cache.earlier_pieces = ()
    start, done, outputs = cache.get_seq_length(), 0, list[BaseModelOutputWithPast]()
    if not divisible(named):
        return None
    try:
        while (count := cache.tokens_of_piece(queries - done)) < queries - done:
            outputs.append(decoder(**piece_of(named, start, done, done + count)))
            done += count
    except BaseException:
        take_back(cache, start)
        raise
    if not outputs:
        return None
    cache.earlier_pieces = outputs
    return piece_of(named, start, done, queries)


def join_pieces(cache: EngineCache, output: Any) -> Any:
    """The output of the whole forward, given that of its last piece, None where that failed."""
    earlier, cache.earlier_pieces = cache.earlier_pieces, ()
    if not earlier:
        return None
    if output is None:
        take_back(cache, cache.get_seq_length() - sum(_tokens(each) for each in earlier))
        return None
    parts = [*earlier, output]
    output.last_hidden_state = torch.cat([each.last_hidden_state for each in parts], dim=1)
    if output.get("hidden_states") is not None:
        layers = zip(*(each.hidden_states for each in parts), strict=True)
        output.hidden_states = tuple(torch.cat(layer, dim=1) for layer in layers)
    return output


def take_back(cache: EngineCache, length: int) -> None:
    """Forget the tokens of finished pieces; a cache that cannot says so when it is used next."""
    with suppress(CacheStateError, HomeError):
        cache.crop(length - cache.get_seq_length())


def _tokens(output: BaseModelOutputWithPast) -> int:
    assert output.last_hidden_state is not None
    return output.last_hidden_state.shape[1]
