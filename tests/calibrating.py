"""Calibrations and inputs for the tiny random models, and reference runs without this package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from infinigen_kv import Calibration, InfiniGenConfig, calibrate
from infinigen_kv.cache.forward import cache_argument
from tiny import PAD_TOKEN, VOCABULARY


class _RandomTokenizer:
    """Gives every text its own random token ids, as many as it has characters."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        generator = torch.Generator().manual_seed(len(text))
        ids = torch.randint(3, VOCABULARY, (len(text),), generator=generator)
        return {"input_ids": ids.tolist()}


RandomTokenizer: Any = _RandomTokenizer  # takes a tokenizer's place


def calibrate_tiny(model: PreTrainedModel, *, rank: int = 4) -> Calibration:
    """A calibration from 600 random tokens; nothing is read from or left in the cache folder."""
    return calibrate(
        model,
        RandomTokenizer(),
        ["x" * 400, "y" * 200],
        tokens=600,
        window=50,
        rank=rank,
        use_cache=False,
    )


def selecting(**changes: Any) -> InfiniGenConfig:
    """Settings that really select on short contexts."""
    settings = {
        "alpha": 2.0,
        "partial_ratio": 0.5,
        "recent_tokens": 2,
        "sink_tokens": 1,
        "max_fetch": 0.3,
        "min_context": 8,
    }
    return InfiniGenConfig(**{**settings, **changes})


def covering(**changes: Any) -> InfiniGenConfig:
    """Settings under which all code of the selection runs and chooses every token."""
    return selecting(**{"alpha": 1e6, "max_fetch": 1.0, "min_context": 1, **changes})


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids ``(rows, length)``, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def left_padded(ids: Tensor, padding: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """``ids`` with the first ``padding[row]`` tokens of each row padded, and the mask."""
    mask = torch.arange(ids.shape[1]) >= torch.tensor(padding)[:, None]
    return ids.masked_fill(~mask, PAD_TOKEN), mask.long()


def positions_of(mask: Tensor) -> Tensor:
    """Positions as `generate` makes them of a mask ``(B, T)``."""
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)


@torch.no_grad()
def run(
    model: PreTrainedModel, cache: Any, ids: Tensor, mask: Tensor | None = None, *, prompt: int
) -> Tensor:
    """Logits ``(B, T, V)`` of ``ids`` ``(B, T)``: the prompt at once, then token by token."""
    pieces = [slice(0, prompt), *(slice(at, at + 1) for at in range(prompt, ids.shape[1]))]
    return torch.cat([feed(model, cache, ids, mask, piece) for piece in pieces], dim=1)


def feed(
    model: PreTrainedModel, cache: Any, ids: Tensor, mask: Tensor | None, piece: slice
) -> Tensor:
    """One forward of the columns ``piece`` of ``ids``; logits ``(B, Q, V)``."""
    inputs: dict[str, Tensor] = {}
    if mask is not None:
        inputs["attention_mask"] = mask[:, : piece.stop]
        inputs["position_ids"] = positions_of(mask)[:, piece]
    arguments = {cache_argument(model): cache, "use_cache": True, **inputs}
    with torch.no_grad():
        return model(input_ids=ids[:, piece], **arguments).logits


def reference(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, *, prompt: int
) -> Tensor:
    """`run` of the plain model with Transformers' own cache."""
    return run(model, DynamicCache(config=model.config), ids, mask, prompt=prompt)


def generate(
    model: PreTrainedModel, ids: Tensor | None, cache: Any = None, *, new: int, **options: Any
) -> Any:
    """Greedy `model.generate`; the new tokens alone, or an output object if one is asked for."""
    if cache is None:
        cache = DynamicCache(config=model.config)
    settings = {"do_sample": False, "pad_token_id": PAD_TOKEN, cache_argument(model): cache}
    generating: Any = model
    output = generating.generate(ids, max_new_tokens=new, **{**settings, **options})
    if not isinstance(output, Tensor) or ids is None:
        return output
    return output[:, ids.shape[1] :]
