"""Decode speed of several policies on one prompt, side by side in one process."""

from __future__ import annotations

import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.cache.forward import forward, prefill, timed_forward
from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.config import PROMPT_CHUNK
from infinigen_kv.errors import InputError
from infinigen_kv.models.soundness import check_logits
from infinigen_kv.policies.registry import check_policy
from infinigen_kv.policies.settings import BUDGET
from infinigen_kv.progress import Progress, no_progress
from infinigen_kv.session.attach import Session
from infinigen_kv.session.paper_link import balanced_rate
from infinigen_kv.storage.link import LinkSpec
from infinigen_kv_lab.kit.divergence import kl_divergence, log_probabilities

WARM_UP = 4  # steps that are not measured
RECORDED = 4  # steps after the measured ones, for the fetched share
EXTRA_STEPS = WARM_UP + RECORDED
IDEAL = "ideal"

StepListener = Callable[[Tensor, Tensor, bool], None]
"""Called in each step with the token ``(B, 1)``, ideal's log-probabilities ``(B, V)``, and whether
the step is measured."""


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """Figures of one policy; times in milliseconds, per decode step of the whole batch.

    ``link_bytes_per_step`` counts entries in both directions, ``disk_bytes_per_step`` the blocks
    that were read from a disk for them, ``link_wait_ms_per_step`` the time that the computation
    stood still for transfers. ``fetched_share`` is over the layers that select,
    ``kl_to_ideal`` the mean KL(ideal || policy) of the next-token distributions in nats.
    ``peak_rss_bytes`` is the process's so far, all policies together. ``resident_layers`` are the
    layers that the policy keeps on the device whole, with their bytes.
    """

    policy: str
    step_ms_median: float
    step_ms_p90: float
    tokens_per_s: float
    link_bytes_per_step: float
    disk_bytes_per_step: float
    link_wait_ms_per_step: float
    link_transfer_ms_per_step: float
    fetched_share: float
    resident_hit_rate: float
    home_bytes: int
    device_kv_bytes: int
    peak_rss_bytes: int
    prompt_seconds: float
    ratio_to_ideal: float
    kl_to_ideal: float
    resident_layers: dict[int, int]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """All policies, and what the figures depend on. ``link_rate`` is in bytes per second."""

    policies: list[PolicyResult]
    link: str
    link_is_emulated: bool
    link_rate: float | None
    batch: int
    prompt_tokens: int
    decode_tokens: int
    direct_io: bool | None
    threads: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(slots=True)
class _Run:
    cache: InfiniGenCache
    prompt_seconds: float = 0.0
    times: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    disk_bytes: int = 0


@torch.no_grad()
def bench(
    session: Session,
    prompt: Tensor,
    *,
    decode_tokens: int,
    policies: Sequence[str],
    prompt_chunk: int | None = PROMPT_CHUNK,
    budget: float = BUDGET,
    also: StepListener | None = None,
    progress: Progress = no_progress,
) -> BenchResult:
    """Time decode steps of every policy, interleaved, all fed the tokens that ``ideal`` generates.

    Parameters
    ----------
    session
        An attached model; its storage says home, link, codec and resident set.
    prompt
        ``(B, P)`` token ids.
    decode_tokens
        Measured steps, at least 1.
    policies
        Names of `policies.registry.POLICIES`; ``ideal`` is always run, since the others are
        compared with it.
    prompt_chunk
        Tokens of the prompt that one forward reads; see `cache.forward.prefill`.
    budget
        As in `Session.new_cache`, for the policies that have one.
    also
        A system that is no policy and takes its turn in each step, e.g. `bench.peers.Peers.step`.

    Raises
    ------
    InputError
        If a name is unknown, or the model has too few positions.
    InfiniGenError
        If the model computes NaN or infinity.
    """
    names = [IDEAL, *(check_policy(name) for name in dict.fromkeys(policies) if name != IDEAL)]
    if decode_tokens < 1:
        raise InputError(f"decode_tokens={decode_tokens} is not valid: it must be >= 1")
    tokens = prompt.shape[1] + decode_tokens + EXTRA_STEPS
    session.check_length(tokens)
    runs: dict[str, _Run] = {}
    rate = LinkSpec.parse(session.storage.link).rate
    try:
        for name in progress(names, "reading the prompt"):
            if name != IDEAL and LinkSpec.parse(session.storage.link).is_paper and rate is None:
                rate = balanced_rate(session, runs[IDEAL].cache, prompt)
            cache = session.new_cache(tokens=tokens, policy=name, link_rate=rate, budget=budget)
            runs[name] = run = _Run(cache)
            started = time.perf_counter()
            prefill(session, cache, prompt, chunk=prompt_chunk).cpu()  # on a GPU, wait for it
            run.prompt_seconds = time.perf_counter() - started
        token = _decode(session, runs, prompt[:, -1:], decode_tokens, also, progress)
        shares = _fetched_shares(session, runs, token)
        base = statistics.median(runs[IDEAL].times)
        results = [
            _result(name, run, decode_tokens, prompt.shape[0], base, shares[name])
            for name, run in runs.items()
        ]
    finally:
        direct = None
        for run in runs.values():
            direct = run.cache.storage.direct_io if direct is None else direct
            run.cache.close()
    return BenchResult(
        policies=results,
        link=session.storage.link,
        link_is_emulated=LinkSpec.parse(session.storage.link).is_emulated,
        link_rate=rate,
        batch=prompt.shape[0],
        prompt_tokens=prompt.shape[1],
        decode_tokens=decode_tokens,
        direct_io=direct,
        threads=torch.get_num_threads(),
    )


def _decode(
    session: Session,
    runs: dict[str, _Run],
    token: Tensor,
    steps: int,
    also: StepListener | None,
    progress: Progress,
) -> Tensor:
    """Warm up, then measure; the policies take turns within each step. Returns the next token."""
    for step in progress(range(WARM_UP + steps), "decoding"):
        if step == WARM_UP:
            gc.collect()
            for run in runs.values():
                run.cache.reset_statistics()
                run.disk_bytes = run.cache.storage.disk_bytes_read
        following = token
        for name, run in runs.items():
            logits, elapsed = timed_forward(session.model, token, run.cache)
            check_logits(logits)
            scores = log_probabilities(logits[:, -1])
            if name == IDEAL:
                reference = scores
                following = scores.argmax(-1, keepdim=True)
            if step >= WARM_UP:
                run.times.append(elapsed)
                run.kl.append(kl_divergence(reference, scores).mean().item())
        if also is not None:
            also(token, reference, step >= WARM_UP)
        token = following
    for run in runs.values():
        link = run.cache.storage.link.statistics
        run.totals = {
            "bytes": link.bytes_down + link.bytes_up,
            "disk": run.cache.storage.disk_bytes_read - run.disk_bytes,
            "wait": link.wait_seconds,
            "transfer": link.transfer_seconds,
            "hit": run.cache.resident_hit_rate,
        }
    return token


def _fetched_shares(session: Session, runs: dict[str, _Run], token: Tensor) -> dict[str, float]:
    """Shares in a few steps of their own, since recording takes time."""
    recorders = {name: FetchRecorder() for name in runs}
    for _ in range(RECORDED):
        for name, run in runs.items():
            run.cache.recorder = recorders[name]
            logits = forward(session.model, token, run.cache)
            if name == IDEAL:
                following = logits[:, -1].argmax(-1, keepdim=True)
        token = following
    shares = {}
    for name, run in runs.items():
        by_layer = recorders[name].fetched_by_layer
        # steps on short contexts select nothing, and none is recorded
        layers = run.cache.speculated_layers or list(by_layer) or [0]
        shares[name] = statistics.fmean(by_layer.get(layer, 1.0) for layer in layers)
    return shares


def _result(
    name: str, run: _Run, steps: int, rows: int, base: float, fetched: float
) -> PolicyResult:
    median = statistics.median(run.times)
    return PolicyResult(
        policy=name,
        step_ms_median=median,
        step_ms_p90=sorted(run.times)[min(steps - 1, int(0.9 * steps))],
        tokens_per_s=rows * 1e3 / median,
        link_bytes_per_step=run.totals["bytes"] / steps,
        disk_bytes_per_step=run.totals["disk"] / steps,
        link_wait_ms_per_step=run.totals["wait"] * 1e3 / steps,
        link_transfer_ms_per_step=run.totals["transfer"] * 1e3 / steps,
        fetched_share=fetched,
        resident_hit_rate=run.totals["hit"],
        home_bytes=run.cache.home_bytes,
        device_kv_bytes=run.cache.device_bytes,
        peak_rss_bytes=_peak_rss(),
        prompt_seconds=run.prompt_seconds,
        ratio_to_ideal=median / base,
        kl_to_ideal=statistics.fmean(run.kl),
        resident_layers=run.cache.resident_layers,
    )


def _peak_rss() -> int:
    """Largest resident size of the process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
