"""How close selected attention stays to full attention on a text, teacher-forced."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.cache.forward import decode, forward, prefill
from infinigen_kv.cache.recorder import FidelityRecorder
from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.config import PROMPT_CHUNK, InfiniGenConfig
from infinigen_kv.errors import InputError
from infinigen_kv.models.soundness import check_logits
from infinigen_kv.progress import Progress, no_progress
from infinigen_kv.session.attach import Session, attach
from infinigen_kv_lab.kit.divergence import kl_divergence, log_probabilities

BLOCK = 128  # decode positions evaluated in one forward


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Result of `measure_fidelity`; shares in [0, 1], KL in nats.

    ``fetched_share`` is over the speculated layers, ``fetched_share_all_layers`` counts those
    that are attended to in full as 1. ``kl_*`` is KL(full || selected) of the next-token
    distribution, ``top1_same`` how often both have the same most likely token, ``ppl*`` the
    perplexity of the measured tokens but the first (NaN where there is but one). ``recall`` and
    ``coverage`` as in `FidelityRecorder`.
    """

    fetched_share: float
    fetched_share_all_layers: float
    kl_mean: float
    kl_p99: float
    top1_same: float
    ppl_full: float
    ppl: float
    recall_mean: float
    coverage_mean: float
    recall_by_layer: dict[int, float]
    fetched_by_layer: dict[int, float]
    coverage_by_layer: dict[int, float]
    prompt_tokens: int
    decode_tokens: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@torch.no_grad()
def measure_fidelity(
    model: PreTrainedModel,
    calibration: Calibration,
    config: InfiniGenConfig,
    tokens: Tensor,
    *,
    prompt_tokens: int,
    prompt_chunk: int | None = PROMPT_CHUNK,
    progress: Progress = no_progress,
) -> Fidelity:
    """Prompt with full attention, then the rest of the text with selection and with full attention.

    Many decode positions are evaluated in one forward; they select what single decode steps would.

    Parameters
    ----------
    tokens
        ``(prompt_tokens + T,)`` token ids; the T positions after the prompt are measured.
    prompt_tokens
        P, at least 1.
    prompt_chunk
        Tokens of the prompt that one forward reads; see `cache.forward.prefill`.

    Raises
    ------
    InputError
        If no token is left after the prompt, or the model has too few positions.
    InfiniGenError
        If the model computes NaN or infinity.
    """
    if not 0 < prompt_tokens < tokens.numel():
        raise InputError(
            f"prompt_tokens={prompt_tokens} is not valid: it must be at least 1 and leave tokens "
            f"to decode, but the text has {tokens.numel()} tokens"
        )
    started = time.perf_counter()
    with attach(model, calibration, config) as session:
        session.check_length(tokens.numel())
        cache = session.new_cache(tokens=tokens.numel())
        recorder = FidelityRecorder()
        tokens = tokens.to(model.device)
        prefill(session, cache, tokens[None, :prompt_tokens], chunk=prompt_chunk)
        measured = _measure(session, cache, recorder, tokens[None, prompt_tokens:], progress)
    kl, same, full_loss, loss = measured
    count = kl.numel()
    recall, coverage = recorder.recall_by_layer, recorder.coverage_by_layer
    return Fidelity(
        fetched_share=recorder.fetched_share(first_layer=config.first_layer),
        fetched_share_all_layers=recorder.fetched_share(),
        kl_mean=kl.mean().item(),
        kl_p99=kl.quantile(0.99).item(),
        top1_same=same / count,
        ppl_full=_perplexity(full_loss, count - 1),
        ppl=_perplexity(loss, count - 1),
        recall_mean=_mean(recall),
        coverage_mean=_mean(coverage),
        recall_by_layer=recall,
        fetched_by_layer=recorder.fetched_by_layer,
        coverage_by_layer=coverage,
        prompt_tokens=prompt_tokens,
        decode_tokens=count,
        seconds=time.perf_counter() - started,
    )


def _measure(
    session: Session,
    cache: InfiniGenCache,
    recorder: FidelityRecorder,
    decoded: Tensor,
    progress: Progress,
) -> tuple[Tensor, int, float, float]:
    """KL per position, agreements, and summed losses with full and selected attention.

    Selection comes first: an exact forward would add the measured tokens to the prompt's
    statistics.
    """
    blocks = decoded.tensor_split(math.ceil(decoded.shape[1] / BLOCK), dim=1)
    cache.recorder = recorder
    with forgetting(cache):
        selected = [
            decode(session.model, block, cache) for block in progress(blocks, "selected attention")
        ]
    cache.recorder = None
    # a single token would otherwise be a decode step, which selects
    cache.expect_prompt(cache.get_seq_length() + decoded.shape[1])
    kl, same, full_loss, loss = [], 0, 0.0, 0.0
    at = 0
    for place, block in enumerate(progress(blocks, "full attention")):
        full = forward(session.model, block, cache)
        reference = log_probabilities(full[0])
        ours = log_probabilities(selected[place][0])
        check_logits(full)
        check_logits(selected[place])
        kl.append(kl_divergence(reference, ours))
        same += int((reference.argmax(-1) == ours.argmax(-1)).sum())
        targets = decoded[0, at + 1 : at + block.shape[1] + 1, None]
        full_loss -= reference[: len(targets)].gather(1, targets).double().sum().item()
        loss -= ours[: len(targets)].gather(1, targets).double().sum().item()
        selected[place] = torch.empty(0)
        at += block.shape[1]
    return torch.cat(kl), same, full_loss, loss


@contextmanager
def forgetting(cache: InfiniGenCache) -> Iterator[None]:
    """Take back what the block adds to the cache, also where it fails.

    `crop` cannot, once a sliding layer's window is full; but such a layer never writes into its
    tensors, so that a shallow copy of it keeps its state. So does one of a policy, which forgets
    what it has learned from the tokens.
    """
    length = cache.get_seq_length()
    policies = [copy(layer.policy) for layer in cache.offloaded]
    before = [copy(layer) if layer.is_sliding else layer for layer in cache.layers]
    try:
        yield
    finally:
        cache.layers = before
        for layer, policy in zip(cache.offloaded, policies, strict=True):
            layer.policy = policy
            layer.truncate(length)


def _perplexity(loss: float, tokens: int) -> float:
    return math.exp(loss / tokens) if tokens else float("nan")


def _mean(values: dict[int, float]) -> float:
    return sum(values.values()) / len(values) if values else float("nan")
