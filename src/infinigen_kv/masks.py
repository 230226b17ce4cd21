"""Masks of an attached model's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask


def decoder_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """A Transformers mask function: None where the order of the tokens says it all.

    Transformers itself leaves the mask out only where nothing is cached; for a later chunk of a
    prompt it would make ``(B, 1, Q, S)``, which `attention.dense_attention` has no need of.

    Returns
    -------
    Tensor or None
        Boolean, ``(B, 1, q_length, kv_length)``. None: the queries are the last tokens, none of
        them is padding, and each sees all before it.
    """
    plain = mask_function is causal_mask_function and options.get("local_size") is None
    last = type(q_offset) is int and kv_offset == 0 and kv_length == q_offset + q_length
    if plain and last and options.get("allow_is_causal_skip", True):
        whole = attention_mask is None or attention_mask.shape[-1] == kv_length
        if whole and (attention_mask is None or bool(attention_mask.all())):
            return None
    made: Tensor | None = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **options,
    )
    return made
