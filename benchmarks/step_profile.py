"""Where the time of one decode step goes, with either kernels.

    python benchmarks/step_profile.py [--prompt-tokens 7900] [--steps 24] [--link none]

The engine's own parts are timed by wrappers around them, in steps of their own; what is left is the
model's code and the hooks. The caches take turns step by step. A table goes to stderr, one JSON
object to stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from infinigen_kv import InfiniGenCache, Session, StorageConfig, attach, calibrate, load_model
from infinigen_kv.cache.forward import forward, prefill
from infinigen_kv.calibration.texts import documentation_text

WARM_UP = 4
SHORT = 64  # tokens of a context at which nothing but the model costs time


class Stopwatch:
    """Milliseconds by part; a part within another counts for itself only."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = (time.perf_counter() - started) * 1e3
                self.totals[part] += elapsed - self._inner.pop()
                self._inner[-1] += elapsed

        return timed


def watch(cache: InfiniGenCache, stopwatch: Stopwatch) -> None:
    """Time the engine's parts in this cache from now on."""
    kernels = cache.offloaded[0]._kernels
    for part, name in (
        ("scores and selection", "select"),
        ("attention over the selection", "attend"),
        ("attention over everything", "attend_all"),
        ("partial keys of the new token", "append"),
    ):
        setattr(kernels, name, stopwatch.wrap(part, getattr(kernels, name)))
    for layer in cache.offloaded:
        pool, policy = layer.pool, layer.policy
        assert pool is not None
        policy.predict = stopwatch.wrap("predicted query", policy.predict)  # type: ignore[method-assign]
        for part, name in (
            ("look-up and start of the fetch", "prefetch"),
            ("waiting for the fetch", "collect_in_place"),
            ("new entry to home and resident set", "append"),
        ):
            setattr(pool, name, stopwatch.wrap(part, getattr(pool, name)))


@torch.no_grad()
def profile(session: Session, ids: Tensor, prompt: int, steps: int) -> dict[str, Any]:
    """Medians of whole steps, and means of their parts, by kernels."""
    found: dict[str, Any] = {}
    runs = {}
    for name in ("torch", "native"):
        cache = session.new_cache(tokens=prompt + 2 * steps + WARM_UP + 1, kernels=name)
        prefill(session, cache, ids[:, :prompt])
        runs[name] = (cache, Stopwatch(), [])
    for number in range(WARM_UP + 2 * steps):
        for cache, stopwatch, times in runs.values():
            if number == WARM_UP + steps:
                watch(cache, stopwatch)
            started = time.perf_counter()
            forward(session.model, ids[:, prompt + number, None], cache, last_only=True)
            times.append((time.perf_counter() - started) * 1e3)
    for name, (_, stopwatch, times) in runs.items():
        parts = {part: total / steps for part, total in stopwatch.totals.items()}
        watched = statistics.fmean(times[WARM_UP + steps :])
        parts["the model's own code, and hooks"] = watched - sum(parts.values())
        found[name] = {
            "step_ms_median": statistics.median(times[WARM_UP : WARM_UP + steps]),
            "watched_ms_mean": watched,
            "parts_ms": parts,
        }
    return found


@torch.no_grad()
def short_step(session: Session, ids: Tensor, steps: int) -> float:
    """Median of a step at a short context: the model alone."""
    cache = session.new_cache(tokens=SHORT + steps + WARM_UP + 1, policy="ideal")
    prefill(session, cache, ids[:, :SHORT])
    times = []
    for number in range(WARM_UP + steps):
        started = time.perf_counter()
        forward(session.model, ids[:, SHORT + number, None], cache, last_only=True)
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[WARM_UP:])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prompt-tokens", type=int, default=7900)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--link", default="none")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    loaded = load_model("smollm2", dtype=getattr(torch, options.dtype))
    calibration = calibrate(loaded.model, loaded.tokenizer)
    text = documentation_text()
    ids = torch.tensor([loaded.tokenizer(text, verbose=False)["input_ids"]])
    with attach(loaded.model, calibration, storage=StorageConfig(link=options.link)) as session:
        found = profile(session, ids, options.prompt_tokens, options.steps)
        short = short_step(session, ids, options.steps)
    for name, each in found.items():
        print(f"{name}: {each['step_ms_median']:.1f} ms a step", file=sys.stderr)
        for part, cost in sorted(each["parts_ms"].items(), key=lambda item: -item[1]):
            print(f"  {cost:6.2f}  {part}", file=sys.stderr)
    print(f"a step at {SHORT} tokens: {short:.1f} ms", file=sys.stderr)
    print(json.dumps({**vars(options), "short_step_ms": short, "kernels": found}))


if __name__ == "__main__":
    main()
