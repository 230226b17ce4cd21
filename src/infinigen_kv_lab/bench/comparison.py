"""The full cache against selected ones: what they fetch, how close they stay, how fast they are."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.cache.forward import decode, forward, prefill
from infinigen_kv.cache.recorder import FidelityRecorder
from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.checks import check_integer
from infinigen_kv.config import PROMPT_CHUNK, InfiniGenConfig
from infinigen_kv.errors import InputError
from infinigen_kv.progress import Progress, no_progress
from infinigen_kv.session.attach import Session, attach
from infinigen_kv.session.paper_link import paper_link_rate
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv.storage.link import LinkSpec
from infinigen_kv_lab.bench.fidelity import forgetting
from infinigen_kv_lab.kit.divergence import kl_divergence, log_probabilities

FULL = "full"


@dataclass(frozen=True, slots=True)
class SystemResult:
    """What one system did with the prompt.

    ``text`` and ``token_ids`` are its own greedy answer. ``same_prefix`` and ``same_tokens`` count
    the tokens equal to the full cache's: up to the first difference, and position by position.

    The rest but ``ms_per_token`` (median of the answer's decode steps) and ``prompt_seconds`` is
    measured while every system reads the full cache's answer: ``kl_mean`` KL(full || system) of the
    next-token distribution in nats; ``fetched_share`` over the speculated layers,
    ``fetched_share_all_layers`` with the layers attended to in full counted as 1; ``recall`` and
    ``coverage`` as in `FidelityRecorder` (empty and NaN for the full cache).
    """

    name: str
    text: str
    token_ids: tuple[int, ...]
    same_prefix: int
    same_tokens: int
    fetched_share: float
    fetched_share_all_layers: float
    kl_mean: float
    recall_mean: float
    coverage_mean: float
    ms_per_token: float
    prompt_seconds: float
    fetched_by_layer: dict[int, float]
    recall_by_layer: dict[int, float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of `compare`; the full cache comes first in ``systems``."""

    prompt_tokens: int
    new_tokens: int
    systems: tuple[SystemResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Run:
    """One system's answer, and its logits ``(T, V)`` and records on the full cache's answer."""

    tokens: list[int]
    logits: Tensor
    recorder: FidelityRecorder
    step_seconds: list[float]
    prompt_seconds: float


@torch.no_grad()
def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    calibration: Calibration,
    configs: Mapping[str, InfiniGenConfig],
    prompt: Tensor,
    *,
    new_tokens: int = 64,
    prompt_chunk: int | None = PROMPT_CHUNK,
    storage: StorageConfig | None = None,
    progress: Progress = no_progress,
) -> Comparison:
    """Answer one prompt with the full cache and with each config.

    Every system reads the prompt once, with full attention. It answers greedily in plain decode
    steps, which are timed; then the answer is forgotten and the full cache's answer is read in
    one forward, in which the system selects for each token as a decode step would.

    Parameters
    ----------
    configs
        By the system's name; ``full`` is taken.
    prompt
        ``(1, P)`` token ids.
    new_tokens
        Decode steps; an end token ends an answer sooner.
    prompt_chunk
        Tokens of the prompt that one forward reads; see `cache.forward.prefill`.
    storage
        Where the KV lives and how it moves; None keeps it in memory. With a capacity limit, recall
        and coverage are not measured.
    progress
        Wraps the list of systems.

    Raises
    ------
    InputError
        If the prompt is empty, ``new_tokens`` is below 1, or both exceed the model's positions.
    """
    check_integer("new_tokens", new_tokens, 1)
    if FULL in configs:
        raise InputError(f"the name {FULL!r} is taken by the full cache: name the config otherwise")
    end_tokens = _end_tokens(model)
    prompt = prompt.to(model.device)
    reference: _Run | None = None
    rate: float | None = None
    results = []
    for name in progress([FULL, *configs], "comparing"):
        with attach(model, calibration, configs.get(name), storage) as session:
            session.check_length(prompt.shape[1] + new_tokens)
            if rate is None and LinkSpec.parse(session.storage.link).is_paper:
                rate = paper_link_rate(session, context=prompt.shape[1])
            cache = session.new_cache(
                tokens=prompt.shape[1] + new_tokens,
                policy="stream" if name == FULL else "infinigen",
                link_rate=rate,
            )
            forced = None if reference is None else reference.tokens
            read = partial(prefill, session, cache, prompt, chunk=prompt_chunk)
            run = _run(session, cache, read, new_tokens, end_tokens, forced)
        reference = reference or run
        text = str(tokenizer.decode(run.tokens, skip_special_tokens=True))
        first_layer = 0 if name == FULL else configs[name].first_layer
        results.append(_result(name, text, run, reference, first_layer))
    assert reference is not None
    return Comparison(prompt.shape[1], len(reference.tokens), tuple(results))


def _run(
    session: Session,
    cache: InfiniGenCache,
    read_prompt: Callable[[], Tensor],
    new_tokens: int,
    end_tokens: set[int],
    forced: list[int] | None,
) -> _Run:
    """Answer, go back to the prompt's end, and read ``forced`` (None: the answer itself)."""
    started = time.perf_counter()
    logits = read_prompt()
    prompt_seconds = time.perf_counter() - started
    recorder = FidelityRecorder()
    limited = session.storage.capacity is not None
    if limited:  # evicted tokens do not come back: read the prompt again, then step by step
        tokens, seconds = _answer(session, cache, logits, new_tokens, end_tokens)
        cache.reset()
        read_prompt()
    else:
        with forgetting(cache):
            tokens, seconds = _answer(session, cache, logits, new_tokens, end_tokens)
    answer = torch.tensor([forced or tokens], device=logits.device)
    cache.recorder = recorder
    pieces = answer.split(1 if limited else answer.shape[1], dim=1)
    logits = torch.cat([decode(session.model, piece, cache)[0] for piece in pieces]).float()
    return _Run(tokens, logits, recorder, seconds, prompt_seconds)


def _answer(
    session: Session,
    cache: InfiniGenCache,
    logits: Tensor,
    new_tokens: int,
    end_tokens: set[int],
) -> tuple[list[int], list[float]]:
    """Greedy tokens after the prompt's last ``logits``, and the seconds of each decode step."""
    tokens: list[int] = []
    seconds: list[float] = []
    for _ in range(new_tokens):
        token = logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(int(token))
        if tokens[-1] in end_tokens:
            break
        started = time.perf_counter()
        logits = forward(session.model, token, cache, last_only=True)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        seconds.append(time.perf_counter() - started)
    return tokens, seconds


def _result(name: str, text: str, run: _Run, reference: _Run, first_layer: int) -> SystemResult:
    recall = run.recorder.recall_by_layer
    fetched = run.recorder.fetched_by_layer
    same = [a == b for a, b in zip(run.tokens, reference.tokens, strict=False)]
    exact, ours = log_probabilities(reference.logits), log_probabilities(run.logits)
    return SystemResult(
        name=name,
        text=text,
        token_ids=tuple(run.tokens),
        same_prefix=(same + [False]).index(False),
        same_tokens=sum(same),
        fetched_share=run.recorder.fetched_share(first_layer=first_layer),
        fetched_share_all_layers=_mean(fetched),
        kl_mean=kl_divergence(exact, ours).mean().item(),
        recall_mean=_mean(recall),
        coverage_mean=_mean(run.recorder.coverage_by_layer),
        ms_per_token=1000 * statistics.median(run.step_seconds or [float("nan")]),
        prompt_seconds=run.prompt_seconds,
        fetched_by_layer=fetched,
        recall_by_layer=recall,
    )


def _end_tokens(model: PreTrainedModel) -> set[int]:
    """Token ids that end an answer, as ``model.generate`` would see them."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = model.config.eos_token_id
    if configured is None:
        return set()
    return {configured} if isinstance(configured, int) else set(configured)


def _mean(values: Mapping[int, float]) -> float:
    return sum(values.values()) / len(values) if values else float("nan")
