"""Attention over entries, for every family: grouped heads, masks, scaling, soft-capping."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK = 1024  # queries that a mask is converted for at once; fewer slow the fused kernel
SCORES = 2**22  # scores made at once where no fused kernel applies: more leave the caches


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Attention of one query position per row.

    The query heads of a group are folded into the query axis, so that each KV head is read once:
    on a CPU 17 times faster than ``scaled_dot_product_attention(enable_gqa=True)``.

    Parameters
    ----------
    query
        ``(B, H, 1, D)``.
    keys, values
        ``(B, H_kv, n, D)`` and ``(B, H_kv, n, D_v)``.
    scaling, softcap
        Multiplies the scores; ``softcap * tanh(score / softcap)`` after that (Gemma 2).
    visible
        Boolean, broadcastable to ``(B, H_kv, 1, n)``, or None for all.

    Returns
    -------
    Tensor
        ``(B, 1, H, D_v)``, the layout of a Transformers attention function.
    """
    rows, heads, _, dim = query.shape
    grouped = query.reshape(rows, keys.shape[1], -1, dim)  # (B, H_kv, G, D)
    scores = torch.matmul(grouped * scaling, keys.mT)
    output = torch.matmul(_probabilities(scores, softcap, visible, values.dtype), values)
    return output.reshape(rows, 1, heads, -1)


def decode_weights(
    query: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Probabilities of `decode_attention`, summed over a group's queries: ``(B, H_kv, n)``."""
    rows, _, _, dim = query.shape
    grouped = query.reshape(rows, keys.shape[1], -1, dim).float()  # (B, H_kv, G, D)
    scores = torch.matmul(grouped * scaling, keys.float().mT)
    return _probabilities(scores, softcap, visible, torch.float32).sum(dim=2)


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of many query positions; without a mask, causal.

    What is made on the way is bounded: keys and values are not copied for the heads of a group, a
    mask is converted for `QUERY_BLOCK` queries at once, and where scores have to be made, there are
    about `SCORES` of them at once.

    Parameters
    ----------
    query, keys, values
        ``(B, H, Q, D)``, ``(B, H_kv, S, D)`` and ``(B, H_kv, S, D_v)``; the queries are the last
        Q of the S tokens.
    mask
        Boolean, broadcastable to ``(B, H_kv, Q, S)``, or None. Rows of padding may see nothing:
        their output is 0.

    Returns
    -------
    Tensor
        ``(B, Q, H, D_v)``.
    """
    queries, tokens = query.shape[2], keys.shape[2]
    if queries == 1 and dropout == 0.0:
        return decode_attention(query, keys, values, scaling=scaling, softcap=softcap, visible=mask)
    if softcap is not None:
        output = _softcapped_attention(query, keys, values, scaling, softcap, mask, dropout)
    elif mask is None and queries == tokens:
        output = F.scaled_dot_product_attention(
            query,
            keys,
            values,
            dropout_p=dropout,
            is_causal=True,
            scale=scaling,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        output = _with_nan_of(query, output)
    elif mask is None and _has_fused_parts(query, values, dropout):
        output = _with_nan_of(query, _continued_attention(query, keys, values, scaling))
    else:
        output = _masked_attention(query, keys, values, scaling, mask, dropout)
    return output.transpose(1, 2)


def causal_mask(queries: int, tokens: int, device: torch.device) -> Tensor:
    """``(1, 1, queries, tokens)`` boolean, the queries being the last of the tokens."""
    position = torch.arange(tokens, device=device)
    return (position <= position[tokens - queries :, None])[None, None]


def grouped_scores(query: Tensor, keys: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Attention scores before mask and softmax, ``(B, H_kv, G, Q, S)`` float32.

    ``query`` is ``(B, H, Q, D)``, ``keys`` ``(B, H_kv, S, D)``.
    """
    rows, _, queries, dim = query.shape
    heads, tokens = keys.shape[1:3]
    # the group folded into the queries: a matmul that broadcasts would copy the keys G times
    folded = query.float().reshape(rows, heads, -1, dim) * scaling
    scores = torch.matmul(folded, keys.float().mT).view(rows, heads, -1, queries, tokens)
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _has_fused_parts(query: Tensor, values: Tensor, dropout: float) -> bool:
    """Whether `_continued_attention` applies.

    Its kernel is the CPU's, wants keys as wide as values, and has no gradient for the sums of
    exponentials.
    """
    same_width = query.shape[3] == values.shape[3]
    return query.device.type == "cpu" and same_width and dropout == 0.0 and not query.requires_grad


def _continued_attention(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Causal attention of the last Q of S > Q tokens without a mask: ``(B, H, Q, D)``.

    Over the earlier tokens, all of which count, and over the last Q, where the fused kernel's own
    causal order holds; joined by the logarithms of their sums of exponentials. About 12 % faster on
    a CPU than a mask, which every head would have to read.
    """
    rows, _, queries, dim = query.shape
    heads, past = keys.shape[1], keys.shape[2] - queries
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    folded = query.reshape(rows, heads, -1, dim)  # (B, H_kv, G * Q, D)
    before, before_log = fused(
        folded, keys[:, :, :past], values[:, :, :past], 0.0, False, scale=scaling
    )
    by_head = folded.reshape(rows * heads, -1, queries, dim)  # (B * H_kv, G, Q, D)
    own_keys, own_values = (
        entry[:, :, past:].reshape(rows * heads, 1, queries, dim).expand_as(by_head)
        for entry in (keys, values)
    )
    own, own_log = fused(by_head, own_keys, own_values, 0.0, True, scale=scaling)
    share = torch.sigmoid(own_log.reshape_as(before_log) - before_log).unsqueeze(-1)
    joined = torch.lerp(before.float(), own.reshape_as(before).float(), share)
    return joined.to(query.dtype).reshape(rows, -1, queries, dim)


def _with_nan_of(query: Tensor, output: Tensor) -> Tensor:
    """NaN for queries of NaN, which must not go unseen: the CPU's fused kernel gives them 0."""
    if query.device.type != "cpu":
        return output
    broken = query.isnan().any(dim=-1, keepdim=True)
    return output.masked_fill(broken, float("nan")) if bool(broken.any()) else output


def _masked_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    mask: Tensor | None,
    dropout: float,
) -> Tensor:
    """``(B, H, Q, D_v)``; one head of every group at a time, since not every fused kernel takes
    both a mask and grouped heads.
    """
    rows, heads, queries, dim = query.shape
    grouped = query.reshape(rows, keys.shape[1], -1, queries, dim)
    output = query.new_empty(*grouped.shape[:4], values.shape[3])
    for block, seen in _query_blocks(queries, keys.shape[2], mask, query.device, QUERY_BLOCK):
        reach = seen.shape[3]
        bias = query.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        for member in range(grouped.shape[2]):
            output[:, :, member, block] = F.scaled_dot_product_attention(
                grouped[:, :, member, block],
                keys[:, :, :reach],
                values[:, :, :reach],
                attn_mask=bias,
                dropout_p=dropout,
                scale=scaling,
            )
    return output.view(rows, heads, queries, -1)


def _softcapped_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    softcap: float,
    mask: Tensor | None,
    dropout: float,
) -> Tensor:
    """``(B, H, Q, D_v)``; scores are made here, because no fused kernel of PyTorch caps them."""
    rows, heads, queries, _ = query.shape
    kv_heads, tokens = keys.shape[1:3]
    exact_keys = keys.float()
    at_once = min(QUERY_BLOCK, max(1, SCORES // (rows * heads * tokens)))
    blocks = []
    for block, seen in _query_blocks(queries, tokens, mask, query.device, at_once):
        reach = seen.shape[3]
        scores = grouped_scores(query[:, :, block], exact_keys[:, :, :reach], scaling, softcap)
        weights = _probabilities(scores, None, seen.unsqueeze(2), values.dtype)
        weights = F.dropout(weights, dropout, training=dropout > 0)
        mixed = torch.matmul(weights.flatten(2, 3), values[:, :, :reach])  # (B, H_kv, G * q, D_v)
        blocks.append(mixed.view(rows, kv_heads, -1, weights.shape[3], values.shape[3]))
    return torch.cat(blocks, dim=3).view(rows, heads, queries, -1)


def _query_blocks(
    queries: int, tokens: int, mask: Tensor | None, device: torch.device, at_once: int
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of ``at_once`` queries, and what each may see: ``(B or 1, H_kv or 1, q, reach)``.

    Without a mask a block reaches as far as its last query does.
    """
    if mask is not None:
        mask = mask.expand(-1, -1, queries, -1)
    for start in range(0, queries, at_once):
        block = slice(start, min(start + at_once, queries))
        if mask is not None:
            yield block, mask[:, :, block]
        else:
            reach = tokens - queries + block.stop
            yield block, causal_mask(block.stop - start, reach, device)


def _probabilities(
    scores: Tensor, softcap: float | None, visible: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Softmax in float32 over the visible tokens; a query that sees nothing gets zeros."""
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(dtype)
    hidden = ~visible
    masked = scores.float().masked_fill(hidden, float("-inf"))
    # not `nan_to_num`, which would also hide the NaN of a broken model
    return torch.softmax(masked, dim=-1).masked_fill(hidden, 0.0).to(dtype)
