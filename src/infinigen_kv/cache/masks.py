"""Masks of an attached model's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from infinigen_kv.cache.contract import opaque
from infinigen_kv.errors import InputError
from infinigen_kv.rehearsal.select import Selection, selection_mask

if TYPE_CHECKING:
    from infinigen_kv.policies.step import Step


@opaque
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
    prompt it would make ``(B, 1, Q, S)``, which `attention.dense.dense_attention` has no need of.

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


def visible_tokens(attention_mask: Tensor | None, rows: int, tokens: int) -> Tensor | None:
    """The caller's 2-D mask as booleans ``(rows, tokens)``; None where nothing is padding.

    Raises
    ------
    InputError
        If it has another shape.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise InputError(
            f"attention_mask has {attention_mask.dim()} dimensions: an attached model takes a "
            "2-D mask (rows, tokens), 1 for tokens and 0 for padding, or none"
        )
    if attention_mask.shape != (rows, tokens):
        raise InputError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, but {rows} rows of {tokens} "
            "tokens are in the cache and this forward together"
        )
    visible = attention_mask.bool()
    return None if bool(visible.all()) else visible


def mask_of_selection(selection: Selection, step: Step) -> Tensor:
    """Boolean ``(B, H_kv, Q, start + Q)``: what each query selected, and its own token."""
    selected = selection_mask(selection, step.start + step.queries)
    own = torch.arange(step.start, step.start + step.queries, device=selected.device)
    return selected.scatter(-1, own[None, None, :, None].expand(*selected.shape[:3], 1), True)


def mask_of_no_tail(attended: Tensor, step: Step) -> Tensor:
    """What a step with several queries attends to exactly, or not at all: ``(B, H_kv, 1, Q, S)``.

    ``attended`` is what `mask_of_selection` made.
    """
    allowed = step.candidates.allowed
    assert allowed is not None  # several queries: not all tokens come before each
    return (attended | ~allowed.to(attended.device)).unsqueeze(2)


def mask_of_held(mask: Tensor | None, positions: Tensor, step: Step) -> Tensor | None:
    """The model's mask ``(B, 1, Q, start + Q)`` for the held tokens and the new ones.

    ``positions`` ``(B, S)``: where held tokens stand in it. All of them come before the queries.
    """
    if mask is None:
        return None
    new = torch.arange(step.start, step.start + step.queries).expand(positions.shape[0], -1)
    columns = torch.cat([positions, new.to(positions.device)], dim=1).to(mask.device)
    wide = columns[:, None, None, :].expand(-1, mask.shape[1], mask.shape[2], -1)
    return mask.expand(columns.shape[0], -1, -1, -1).gather(3, wide)
