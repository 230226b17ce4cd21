"""What tests compare with: plain forwards and single decode steps; a selecting step by itself."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infinigen_kv import Calibration, InfiniGenConfig, StorageConfig, attach
from infinigen_kv.cache.forward import forward, prefill
from infinigen_kv.policies.step import Step


@torch.no_grad()
def plain(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Log-probabilities ``(T, V)`` of the model as it comes, float64."""
    return model(input_ids=ids[None], use_cache=False).logits[0].double().log_softmax(-1)


@torch.no_grad()
def stepped(
    model: PreTrainedModel,
    calibration: Calibration | None,
    config: InfiniGenConfig,
    ids: Tensor,
    prompt: int,
    *,
    policy: str = "infinigen",
    budget: float = 0.2,
    storage: StorageConfig | None = None,
) -> Tensor:
    """Log-probabilities ``(T - prompt, V)`` after each token that follows the prompt, each fed on
    its own as `generate` would.
    """
    with attach(model, calibration, config, storage) as session:
        cache = session.new_cache(tokens=ids.numel(), policy=policy, budget=budget)
        prefill(session, cache, ids[None, :prompt])
        steps = [
            forward(model, ids[None, at : at + 1], cache)[0] for at in range(prompt, ids.numel())
        ]
    return torch.cat(steps).double().log_softmax(-1)


def decode_step(config: InfiniGenConfig, start: int, queries: int, rows: int = 1) -> Step:
    """A selecting step of rows without padding, as a cache makes it."""
    return Step(
        start=start,
        queries=queries,
        rows=rows,
        visible=None,
        position_ids=torch.arange(start, start + queries)[None],
        selecting=True,
        config=config,
    )
