"""Forward passes on an attached model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infinigen_kv.cache import InfiniGenCache
from infinigen_kv.errors import InputError
from infinigen_kv.session import Session


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


@torch.no_grad()
def prefill(
    session: Session, cache: InfiniGenCache, token_ids: Tensor, *, chunk: int | None = None
) -> Tensor:
    """Read a prompt ``(B, Q)`` with full attention; logits of its last position ``(B, 1, V)``.

    ``chunk`` tokens at a time, None for all at once.
    """
    tokens = token_ids.shape[1]
    if tokens == 0:
        raise InputError("the prompt is empty: give at least one token")
    if chunk is not None and chunk < 1:
        raise InputError(f"chunk={chunk} is not valid: it must be an integer >= 1")
    cache.expect_prompt(cache.get_seq_length() + tokens)
    for piece in token_ids.split(chunk or tokens, dim=1):
        logits = forward(session.model, piece, cache, last_only=True)
    return logits
