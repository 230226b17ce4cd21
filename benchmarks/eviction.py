"""Perplexity of SmolLM2 with a capacity limit, teacher-forced in single decode steps.

    python benchmarks/eviction.py TEXT [--skip-tokens 4000] [--prompt-tokens 2048]
        [--decode-tokens 512] [--capacity 0.8]

One JSON object per eviction on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch

from infinigen_kv import attach, calibrate, load_model
from infinigen_kv.cache.forward import forward, prefill
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv.storage.homes.slots import EVICTIONS


@torch.no_grad()
def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--skip-tokens", type=int, default=4000)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--decode-tokens", type=int, default=512)
    parser.add_argument("--capacity", type=float, default=0.8)
    options = parser.parse_args()
    loaded = load_model("smollm2", dtype=torch.float32)
    calibration = calibrate(loaded.model, loaded.tokenizer)
    ids = loaded.tokenizer(options.text.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    total = options.prompt_tokens + options.decode_tokens
    tokens = torch.tensor(ids[options.skip_tokens : options.skip_tokens + total])[None]
    prompt, following = tokens.split([options.prompt_tokens, options.decode_tokens], dim=1)
    limits = {"none": None, **dict.fromkeys(EVICTIONS, options.capacity)}
    for name, capacity in limits.items():
        evict = "counter" if capacity is None else name
        storage = StorageConfig(capacity=capacity, evict=evict)
        with attach(loaded.model, calibration, storage=storage) as session:
            cache = session.new_cache(tokens=total)
            logits = prefill(session, cache, prompt)
            loss = 0.0
            for step in range(options.decode_tokens):
                token = following[:, step : step + 1]
                loss -= logits[0, -1].float().log_softmax(-1)[token].item()
                logits = forward(loaded.model, token, cache)
                print(f"\r{name} {step + 1}", end="", file=sys.stderr)
        perplexity = math.exp(loss / options.decode_tokens)
        print(file=sys.stderr)
        print(
            json.dumps({"eviction": name, "capacity": capacity, "perplexity": perplexity}),
            flush=True,
        )


if __name__ == "__main__":
    main()
