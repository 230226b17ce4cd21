"""One block's time, split into what it went to (the paper's Figure 18).

Hooks around the engine's own calls take the time at the borders of each block's parts; what the
link's statistics call waiting is taken out of the part it happened in.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.cache.forward import forward, prefill
from infinigen_kv.config import PROMPT_CHUNK
from infinigen_kv.policies.registry import check_policy
from infinigen_kv.policies.settings import BUDGET
from infinigen_kv.progress import Progress, no_progress
from infinigen_kv.session.attach import Session
from infinigen_kv_lab.bench.run import WARM_UP


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Milliseconds of one block in one decode step of the whole batch, the mean over all blocks.

    ``transfer`` is time that the computation stood still for the link; ``prediction`` is what
    happens for the next block before this one's attention (rehearsal, choice, starting to move);
    ``feed_forward`` is the rest of the block, its norms included.
    """

    transfer: float
    attention: float
    feed_forward: float
    prediction: float

    @property
    def total(self) -> float:
        """Their sum, which is the block's time."""
        return self.transfer + self.attention + self.feed_forward + self.prediction

    def to_dict(self) -> dict[str, float]:
        """Plain values for JSON."""
        return {**asdict(self), "total": self.total}


class BlockTimer:
    """Times the blocks of the forwards that run inside `timing`.

    On a CUDA device the stream is waited for at every border, so that a part's work counts where
    it was queued; that costs time of its own.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waited: Callable[[], float] = lambda: 0.0
        self._marks: dict[int, list[tuple[float, float]]] = {}
        """By layer, the clock at each border and how long the link had been waited for; seconds."""

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Inside the block the model's blocks are timed."""
        untyped: Any = self._session.adapter.decoder
        with ExitStack() as undo:
            for spec in self._session.adapter.layers:
                block, attention = untyped.layers[spec.index], spec.module
                mark = self._marker(spec.index)
                hooks = [
                    block.register_forward_pre_hook(mark),
                    # before the session's own hook, which predicts, and after it
                    attention.register_forward_pre_hook(mark, prepend=True),
                    attention.register_forward_pre_hook(mark),
                    attention.register_forward_hook(mark),
                    block.register_forward_hook(mark),
                ]
                for hook in hooks:
                    undo.callback(hook.remove)
            yield

    def step(self, token: Tensor, cache: InfiniGenCache) -> tuple[Tensor, BlockTimes]:
        """One decode step: logits ``(B, 1, V)`` and the block's times."""
        self._marks = {}
        statistics_ = cache.storage.link.statistics
        self._waited = lambda: statistics_.wait_seconds
        logits = forward(self._session.model, token, cache)
        return logits, _split(np.array(list(self._marks.values())))

    def _marker(self, index: int) -> Callable[..., None]:
        def mark(module: nn.Module, *given: Any) -> None:
            device = self._session.model.device
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            self._marks.setdefault(index, []).append((time.perf_counter(), self._waited()))

        return mark


@torch.no_grad()
def split_blocks(
    session: Session,
    prompt: Tensor,
    *,
    decode_tokens: int,
    policies: Sequence[str],
    link_rate: float | None = None,
    budget: float = BUDGET,
    prompt_chunk: int | None = PROMPT_CHUNK,
    progress: Progress = no_progress,
) -> dict[str, BlockTimes]:
    """Block times of every policy, step by step in turns, all fed what the first one generates.

    Parameters
    ----------
    session
        An attached model.
    prompt
        ``(B, P)`` token ids.
    decode_tokens
        Measured steps, at least 1.
    policies
        Names of `policies.registry.POLICIES`.
    link_rate, budget
        As in `Session.new_cache`.

    Returns
    -------
    dict
        By policy, the mean over the middle half of the steps, ordered by the block's time.
    """
    names = [check_policy(name) for name in dict.fromkeys(policies)]
    tokens = prompt.shape[1] + WARM_UP + decode_tokens
    session.check_length(tokens)
    caches: dict[str, InfiniGenCache] = {}
    times: dict[str, list[BlockTimes]] = {name: [] for name in names}
    timer = BlockTimer(session)
    try:
        for name in progress(names, "reading the prompt"):
            cache = caches[name] = session.new_cache(
                tokens=tokens, policy=name, link_rate=link_rate, budget=budget
            )
            prefill(session, cache, prompt, chunk=prompt_chunk)
        token = prompt[:, -1:]
        gc.collect()
        with timer.timing():
            for step in progress(range(WARM_UP + decode_tokens), "decoding"):
                following = token
                for name, cache in caches.items():
                    logits, block = timer.step(token, cache)
                    if name == names[0]:
                        following = logits[:, -1].argmax(-1, keepdim=True)
                    if step >= WARM_UP:
                        times[name].append(block)
                token = following
    finally:
        for cache in caches.values():
            cache.close()
    return {name: _middle(steps) for name, steps in times.items()}


def _split(marks: np.ndarray) -> BlockTimes:
    """The mean block of one step, from the marks ``(blocks, 5 borders, clock and waited)``."""
    passed, waited = 1e3 * np.diff(marks, axis=1).mean(axis=0).T  # ms in the 4 parts
    before, prediction, attention, after = (passed - waited).tolist()
    return BlockTimes(
        transfer=float(waited.sum()),
        attention=attention,
        feed_forward=before + after,
        prediction=prediction,
    )


def _middle(steps: Sequence[BlockTimes]) -> BlockTimes:
    """The mean of the middle half, so that a disturbance of the machine does not count."""
    ordered = sorted(steps, key=lambda step: step.total)
    cut = len(ordered) // 4
    middle = [astuple(step) for step in ordered[cut : len(ordered) - cut]]
    return BlockTimes(*np.mean(middle, axis=0).tolist())
