"""Time to first token and peak memory of a prompt: ours, at once and in pieces, and Transformers'.

    python benchmarks/prefill.py [--prompt-tokens 2000,4000,8000] [--repeats 3] [--chunk 2048]

Transformers reads the prompt with its DynamicCache, its own `sdpa` attention and the logits of the
last position only. Times: all systems take turns in one process, after a run that is not counted.
Memory: every system and length in a process of its own. A table goes to stderr, one JSON object to
stdout. Links are emulated: what crosses one takes at least bytes / rate.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from infinigen_kv import Session, StorageConfig, attach, calibrate, load_model
from infinigen_kv.cache.forward import forward, prefill
from infinigen_kv.calibration.texts import documentation_text
from process_memory import forget_peak, resident_bytes

PEER = "Transformers"
STEPS = 2  # decode steps after the prompt, for what was put off until then
WARM_UP_TOKENS = 300
MEMORY = ("peak_over_model_bytes", "cache_bytes", "beyond_both_bytes")
EMULATED = StorageConfig(link="emulated:16")

# policy, storage, whether in pieces
SYSTEMS: dict[str, tuple[str, StorageConfig, bool] | None] = {
    PEER: None,
    "full attention, at once": ("ideal", StorageConfig(), False),
    "infinigen, at once": ("infinigen", StorageConfig(), False),
    "infinigen, in pieces": ("infinigen", StorageConfig(), True),
    "infinigen, at once, home ram, link emulated:16": ("infinigen", EMULATED, False),
    "infinigen, in pieces, home ram, link emulated:16": ("infinigen", EMULATED, True),
}


def read(
    name: str, peer: PreTrainedModel, session: Session, ids: Tensor, chunk: int
) -> tuple[Any, Tensor]:
    """Read a prompt with one system; its cache and the first token ``(1, 1)``."""
    system = SYSTEMS[name]
    if system is None:
        cache: Any = DynamicCache(config=peer.config)
        logits = forward(peer, ids, cache, last_only=True)
    else:
        policy, storage, pieces = system
        tokens = ids.shape[1] + STEPS
        cache = session.new_cache(tokens=tokens, policy=policy, storage=storage)
        logits = prefill(session, cache, ids, chunk=chunk if pieces else None)
    return cache, logits[:, -1].argmax(-1, keepdim=True)


@torch.no_grad()
def times(
    peer: PreTrainedModel, session: Session, ids: Tensor, chunk: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Seconds to the first token, and milliseconds of the first decode step; medians."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SYSTEMS}
    for _ in range(repeats):
        for name in SYSTEMS:
            gc.collect()
            model = peer if name == PEER else session.model
            started = time.perf_counter()
            cache, token = read(name, peer, session, ids, chunk)
            int(token)
            first = time.perf_counter()
            int(forward(model, token, cache).argmax())
            found[name].append((first - started, (time.perf_counter() - first) * 1e3))
            if name != PEER:
                cache.close()
    return {
        name: {
            "first_token_s": statistics.median(each[0] for each in runs),
            "first_token_s_all": [each[0] for each in runs],
            "first_step_ms": statistics.median(each[1] for each in runs),
        }
        for name, runs in found.items()
    }


def trim() -> None:
    """Give freed memory back to the system (glibc), so that it does not hide a peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@torch.no_grad()
def memory(name: str, prompt_tokens: int, chunk: int, dtype: str) -> dict[str, Any]:
    """Peak memory of one system in this process, above the model's and the cache's."""
    with prepared(dtype) as (session, peer, ids):
        short = ids[:, :WARM_UP_TOKENS]
        cache, token = read(name, peer, session, short, WARM_UP_TOKENS // 2)
        if name != PEER:
            cache.close()
        del cache
        trim()
        forget_peak()
        before = resident_bytes("VmRSS")
        cache, token = read(name, peer, session, ids[:, :prompt_tokens], chunk)
        int(token)
        peak = resident_bytes("VmHWM") - before
        held = cache_bytes(cache)
    return dict(zip(MEMORY, (peak, held, peak - held), strict=True))


def cache_bytes(cache: Any) -> int:
    """Bytes of KV, and of all that is kept beside it."""
    if isinstance(cache, DynamicCache):
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return int(cache.home_bytes + cache.device_bytes)


@contextmanager
def prepared(dtype: str) -> Iterator[tuple[Session, PreTrainedModel, Tensor]]:
    """The model attached, a copy of it that is not, and a long text as ids ``(1, T)``."""
    loaded = load_model("smollm2", dtype=getattr(torch, dtype))
    peer = copy.deepcopy(loaded.model)
    text = documentation_text()[:200_000]
    ids = torch.tensor([loaded.tokenizer(text, verbose=False)["input_ids"]])
    with attach(loaded.model, calibrate(loaded.model, loaded.tokenizer)) as session:
        yield session, peer, ids


def in_process(name: str, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """`memory` in a process of its own."""
    words = ["--memory-of", name, "--prompt-tokens", str(tokens)]
    words += ["--chunk", str(options.chunk), "--dtype", options.dtype]
    done = subprocess.run(
        [sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prompt-tokens", default="2000,4000,8000")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--no-memory", action="store_true", help="times only")
    parser.add_argument("--memory-of", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    lengths = [int(each) for each in options.prompt_tokens.split(",")]
    if options.memory_of is not None:
        print(json.dumps(memory(options.memory_of, lengths[0], options.chunk, options.dtype)))
        return
    results: dict[int, dict[str, dict[str, Any]]] = {}
    with prepared(options.dtype) as (session, peer, ids):
        times(peer, session, ids[:, :WARM_UP_TOKENS], WARM_UP_TOKENS // 2, 1)
        for tokens in lengths:
            results[tokens] = times(peer, session, ids[:, :tokens], options.chunk, options.repeats)
    if not options.no_memory:
        for tokens in lengths:
            for name in SYSTEMS:
                results[tokens][name] |= in_process(name, tokens, options)
    for tokens in lengths:
        show(tokens, results[tokens])
    print(
        json.dumps(
            {
                "model": "smollm2",
                "dtype": options.dtype,
                "chunk": options.chunk,
                "repeats": options.repeats,
                "threads": torch.get_num_threads(),
                "cores": os.cpu_count(),
                "machine": platform.machine(),
                "torch": torch.__version__,
                "prompt_tokens": results,
            }
        )
    )


def show(tokens: int, systems: dict[str, dict[str, Any]]) -> None:
    """One length's lines of the table."""
    base = systems[PEER]["first_token_s"]
    print(
        f"\n{tokens} tokens: seconds to the first token, against {PEER}, ms of the first step, "
        "peak MB over the model, of which cache, beyond both",
        file=sys.stderr,
    )
    for name, each in systems.items():
        print(
            f"{name:50} {each['first_token_s']:7.2f} {each['first_token_s'] / base:6.3f} "
            f"{each['first_step_ms']:7.0f} "
            + " ".join(f"{each.get(key, float('nan')) / 1e6:6.0f}" for key in MEMORY),
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
