"""Forward passes on an attached model."""

from __future__ import annotations

import inspect
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infinigen_kv.cache.contract import Owner
from infinigen_kv.config import PROMPT_CHUNK
from infinigen_kv.errors import InputError

if TYPE_CHECKING:
    from infinigen_kv.cache.cache import InfiniGenCache


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the cache in the model's forward; before ``cache`` it was ``past_key_values``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def forward(
    model: PreTrainedModel, token_ids: Tensor, cache: Any, *, last_only: bool = False, **inputs: Any
) -> Tensor:
    """Logits of new tokens ``(B, Q)`` on top of a cache: ``(B, Q or 1, vocabulary)``."""
    return model(
        input_ids=token_ids,
        use_cache=True,
        logits_to_keep=1 if last_only else 0,
        **{cache_argument(model): cache},
        **inputs,
    ).logits


def decode(model: PreTrainedModel, token_ids: Tensor, cache: InfiniGenCache) -> Tensor:
    """Logits ``(B, Q, V)`` of tokens ``(B, Q)`` that select, as if each were a decode step.

    In as few pieces as that allows, see `session.pieces`.
    """
    with cache.decoding():
        return forward(model, token_ids, cache)


def timed_forward(model: PreTrainedModel, token_ids: Tensor, cache: Any) -> tuple[Tensor, float]:
    """As `forward`, and the milliseconds that it took; a GPU is waited for."""
    started = time.perf_counter()
    logits = forward(model, token_ids, cache)
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
    return logits, (time.perf_counter() - started) * 1e3


@torch.no_grad()
def prefill(
    session: Owner,
    cache: InfiniGenCache,
    token_ids: Tensor,
    *,
    chunk: int | None = PROMPT_CHUNK,
) -> Tensor:
    """Read a prompt ``(B, Q)`` with full attention; logits of its last position ``(B, 1, V)``.

    Parameters
    ----------
    chunk
        Tokens per row that one forward reads at most, which bounds the memory that it needs beyond
        model and cache (`piece_length`); None for all at once.

    Raises
    ------
    InputError
        If the prompt is empty or ``chunk`` below 1.
    """
    tokens = token_ids.shape[1]
    if tokens == 0:
        raise InputError("the prompt is empty: give at least one token")
    length = piece_length(session, cache, tokens, chunk)
    cache.expect_prompt(cache.get_seq_length() + tokens)
    for piece in token_ids.split(length, dim=1):
        logits = forward(session.model, piece, cache, last_only=True)
    return logits


def piece_length(session: Owner, cache: InfiniGenCache, tokens: int, chunk: int | None) -> int:
    """Length of the pieces in which a prompt of so many tokens is read.

    As equal as can be and at most ``chunk``, so that the last one is no remainder of a few tokens.
    The whole prompt where a limited home cannot hold it: what is evicted after one piece, the next
    could not attend to. And where its length sets the rotary frequencies, which every piece would
    turn its keys by another length's.
    """
    if chunk is not None and chunk < 1:
        raise InputError(f"chunk={chunk} is not valid: it must be an integer >= 1, or None")
    end = cache.get_seq_length() + tokens
    steady = session.adapter.steady_positions
    whole = not cache.storage.holds(end) or (steady is not None and end > steady)
    return even_length(tokens, None if whole else chunk)


def even_length(tokens: int, chunk: int | None) -> int:
    """Length of the pieces, all but the last one equal, that so many tokens make."""
    return tokens if chunk is None else -(-tokens // -(-tokens // chunk))
