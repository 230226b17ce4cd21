"""Rotary positions: the rotation of a query, and how far a configuration's reach."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions in the split-halves layout, which every rotary family here uses.

    Dimension j turns with dimension j + r/2, where r is the number of rotary dimensions; those
    from r on stay as they are (partial rotary embedding).

    Parameters
    ----------
    heads : Tensor of shape (B, H, Q, D)
    cos, sin : Tensors of shape (B, Q, r) or (1, Q, r), r <= D

    Returns
    -------
    Tensor of shape (B, H, Q, D)
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, Q, r)
    size = cos.shape[-1]
    if size == heads.shape[-1]:
        return heads * cos + _turned(heads) * sin
    turning, still = heads[..., :size], heads[..., size:]
    return torch.cat((turning * cos + _turned(turning) * sin, still), dim=-1)


def readable_positions(config: Any) -> int | None:
    """Tokens that a model can read; None for any number.

    ``max_position_embeddings``, or what scaled frequencies reach beyond it: those of dynamic NTK
    follow the text, others reach ``factor`` times the length that the model was trained for, which
    some configurations leave in ``max_position_embeddings``.
    """
    stated = getattr(config, "max_position_embeddings", None)
    if stated is None:
        return None
    reached = [_reach(each, stated) for each in _rotary_settings(config)]
    return min((tokens for tokens in reached if tokens is not None), default=None)


def steady_positions(config: Any) -> int | None:
    """Tokens up to which the frequencies do not depend on the text's length; None for any number.

    Transformers takes those of dynamic and long RoPE from the longest position of a forward.
    """
    limits = [
        each.get("original_max_position_embeddings") or config.max_position_embeddings
        for each in _rotary_settings(config)
        if _is_dynamic(each) or each.get("rope_type") == "longrope"
    ]
    return min(limits, default=None)


def _rotary_settings(config: Any) -> list[dict[str, Any]]:
    """Of every kind of layer, an empty one where there are no rotary positions."""
    given = getattr(config, "rope_parameters", None) or {}
    return [each for each in given.values() if isinstance(each, dict)] or [given]


def _is_dynamic(settings: dict[str, Any]) -> bool:
    return "dynamic" in settings.get("rope_type", "default")


def _reach(settings: dict[str, Any], stated: int) -> int | None:
    if _is_dynamic(settings):
        return None
    trained = settings.get("original_max_position_embeddings")
    if trained is None and settings.get("rope_type") in ("linear", "yarn"):
        trained = stated
    return max(stated, int((settings.get("factor") or 1) * (trained or 0)))


def _turned(heads: Tensor) -> Tensor:
    """Every pair (a, b) of dimensions as (-b, a)."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
