"""Decode speed of llama.cpp on a GGUF file, by context; runs in an environment with xllamacpp.

    python benchmarks/peers/llama_cpp.py MODEL.gguf --output llama.json
        [--prompt OUT/prompt.json] [--contexts 1,4096,8000] [--tokens 64] [--repeats 3]
        [--threads 2]

Weights stay quantised, as in the file, which the name of the system says; the KV cache is of 16
bits, llama.cpp's default. The median of the repeats counts. Timings are llama.cpp's own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xllamacpp

FORMAT = "infinigen-kv peers 1"


def server(options: argparse.Namespace, contexts: list[int]) -> Any:
    """One slot with room for the longest context."""
    params = xllamacpp.CommonParams()
    params.model.path = str(options.model)
    params.n_ctx = max(contexts) + options.tokens + 16
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    return xllamacpp.Server(params)


def prompt_ids(options: argparse.Namespace, length: int) -> list[int]:
    """The prompt from the start, over and over where it is too short."""
    ids = list(range(1000, 1500))
    if options.prompt is not None:
        ids = json.loads(options.prompt.read_text(encoding="utf-8"))["token_ids"]
    return [ids[place % len(ids)] for place in range(length)]


def measure(running: Any, options: argparse.Namespace, context: int) -> dict[str, Any]:
    """Tokens per second on top of ``context`` tokens."""
    request = {
        "prompt": prompt_ids(options, context),
        "n_predict": options.tokens,
        "max_tokens": options.tokens,
        "ignore_eos": True,
        "temperature": 0.0,
    }
    answers = [
        # repeats need not read the prompt again
        running.handle_completions({**request, "cache_prompt": number > 0})["timings"]
        for number in range(options.repeats)
    ]
    short = [each for each in answers if each["predicted_n"] < options.tokens]
    if short:
        raise SystemExit(f"context {context}: {short[0]['predicted_n']} of {options.tokens} tokens")
    speeds = [each["predicted_per_second"] for each in answers]
    return {
        "context": context,
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_s_all": speeds,
        "prompt_seconds": answers[0]["prompt_ms"] / 1e3,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompt", type=Path)
    parser.add_argument("--contexts", default="1,4096,8000")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    contexts = [int(part) for part in options.contexts.split(",")]
    running = server(options, contexts)
    kind = options.model.stem.rpartition(".")[2]
    points = []
    for context in contexts:
        point = measure(running, options, context)
        points.append({"system": f"llama.cpp, {kind} weights", **point})
        print(f"{context} tokens: {point['tokens_per_s']:.1f} tokens/s", file=sys.stderr)
    result = {
        "format": FORMAT,
        "source": f"llama.cpp through xllamacpp {version('xllamacpp')}",
        "settings": {
            "model": options.model.name,
            "threads": options.threads,
            "tokens": options.tokens,
            "repeats": options.repeats,
        },
        "points": points,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
