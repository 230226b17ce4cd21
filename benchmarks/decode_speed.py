"""Decode steps, prefill and calibration of SmolLM2, all in memory, against Transformers' caches.

    python benchmarks/decode_speed.py [--prompt-tokens 8000] [--steps 24] [--dtype bfloat16]

The systems take turns step by step in one process, all fed the same tokens, so that a disturbance
of the machine meets them alike. A table goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from infinigen_kv import InfiniGenConfig, attach, calibrate, load_model
from infinigen_kv.cache.forward import forward
from infinigen_kv.calibration.texts import documentation_text

WARM_UP = 4


def timed(call: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, float]:
    """The call's result and its milliseconds."""
    started = time.perf_counter()
    result = call(*inputs, **options)
    return result, (time.perf_counter() - started) * 1e3


def spread(milliseconds: list[float]) -> dict[str, float]:
    """Median and 90th percentile."""
    ordered = sorted(milliseconds)
    return {
        "median": statistics.median(ordered),
        "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
    }


@torch.no_grad()
def decode(peer: Any, session: Any, ids: Tensor, steps: int) -> dict[str, dict[str, float]]:
    """Step times of every system on the prompt ``ids`` ``(1, P)``, interleaved."""
    tokens = ids.shape[1] + steps + WARM_UP + 2
    ours = session.model
    caches: dict[str, tuple[Any, Any]] = {
        "DynamicCache": (peer, DynamicCache(config=peer.config)),
        "StaticCache": (peer, StaticCache(config=peer.config, max_cache_len=tokens)),
        "full (ours)": (ours, session.new_cache(tokens=tokens, policy="ideal")),
        "infinigen": (ours, session.new_cache(tokens=tokens)),
    }
    for model, cache in caches.values():
        logits = forward(model, ids, cache, last_only=True)
    token = logits.argmax(-1)
    times: dict[str, list[float]] = {name: [] for name in caches}
    for step in range(WARM_UP + steps):
        for name, (model, cache) in caches.items():
            logits, elapsed = timed(forward, model, token, cache)
            if step >= WARM_UP:
                times[name].append(elapsed)
            if name == "DynamicCache":
                following = logits.argmax(-1)
        token = following
    return {name: spread(each) for name, each in times.items()}


@torch.no_grad()
def short_context(model: Any, steps: int) -> dict[str, float]:
    """Step time with almost nothing cached: what the rest of the model costs."""
    cache = DynamicCache(config=model.config)
    token = torch.ones(1, 16, dtype=torch.long)
    times = []
    for _ in range(steps):
        logits, elapsed = timed(forward, model, token, cache, last_only=True)
        token = logits.argmax(-1)
        times.append(elapsed)
    return spread(times[1:])


@torch.no_grad()
def prefills(peer: Any, session: Any, ids: Tensor, repeats: int) -> dict[str, dict[str, float]]:
    """Reading a prompt, which makes its partial keys, and the first step on it."""

    def read(model: Any, cache: Any) -> None:
        token = forward(model, ids, cache, last_only=True).argmax(-1)
        forward(model, token, cache)

    tokens = ids.shape[1] + 2
    runs: dict[str, Callable[[], None]] = {
        "DynamicCache": lambda: read(peer, DynamicCache(config=peer.config)),
        "full (ours)": lambda: read(
            session.model, session.new_cache(tokens=tokens, policy="ideal")
        ),
        "infinigen": lambda: read(session.model, session.new_cache(tokens=tokens)),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(timed(run)[1])
            gc.collect()
    return {name: spread(each) for name, each in times.items()}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--prefill-repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    loaded = load_model("smollm2", dtype=getattr(torch, options.dtype))
    model = loaded.model
    calibration, took = timed(lambda: calibrate(model, loaded.tokenizer, use_cache=False))
    text = documentation_text()[: 8 * options.prompt_tokens]
    ids = torch.tensor(loaded.tokenizer(text, verbose=False)["input_ids"])
    ids = ids[None, : options.prompt_tokens]
    config = InfiniGenConfig()
    peer = copy.deepcopy(model)  # the peers run on Transformers' own attention
    with attach(model, calibration, config) as session:
        steps = decode(peer, session, ids, options.steps)
        reading = prefills(peer, session, ids, options.prefill_repeats)
        floor = short_context(peer, options.steps)
    base = steps["DynamicCache"]["median"]
    for name, each in steps.items():
        print(
            f"{name:14} {each['median']:7.1f} ms a step (p90 {each['p90']:.1f}), "
            f"{base / each['median']:.2f} x DynamicCache"
            + (
                f"; prompt and first step {reading[name]['median']:.0f} ms"
                if name in reading
                else ""
            ),
            file=sys.stderr,
        )
    result = {
        "model": "smollm2",
        "dtype": options.dtype,
        "prompt_tokens": ids.shape[1],
        "steps": options.steps,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "config": {name: getattr(config, name) for name in config.__slots__},
        "calibration_seconds": took / 1e3,
        "step_ms": steps,
        "step_ms_short_context": floor,
        "prefill_ms": reading,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
