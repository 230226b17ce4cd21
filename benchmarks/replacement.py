"""Hit rates of replacement rules for the resident set, on recorded selections of SmolLM2.

    python benchmarks/replacement.py [--prompt-tokens 4096] [--steps 96] [--budget 0.2]

Records what every decode step selects and the margins that it selected by, then replays the record
with each rule. The always-kept window is left out: the ring holds it. One JSON object on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from infinigen_kv import InfiniGenConfig, attach, calibrate, load_model
from infinigen_kv.generate import forward, prefill
from infinigen_kv.policies.infinigen import InfiniGenPolicy
from infinigen_kv.rehearsal.select import group_margin
from infinigen_kv.texts import documentation_text

Trace = list[tuple[NDArray[np.int64], NDArray[np.float32]]]
Score = Callable[["State"], NDArray[np.float64]]


class State:
    """What a rule may look at, per token of one head: everything since the prompt."""

    def __init__(self, tokens: int) -> None:
        self.last = np.full(tokens, -1.0)
        self.count = np.zeros(tokens)
        self.faded = np.zeros(tokens)
        self.margin = np.full(tokens, -1e3)

    def see(self, step: int, wanted: NDArray[np.int64], margin: NDArray[np.float32]) -> None:
        """Take note of one step."""
        self.last[wanted] = step
        self.count[wanted] += 1
        self.faded *= 0.9
        self.faded[wanted] += 1
        known = len(margin)
        self.margin[:known] = 0.7 * np.maximum(self.margin[:known], -50) + 0.3 * margin


RULES: dict[str, Score] = {
    "lru": lambda state: state.last,
    "lfu": lambda state: state.count + 1e-3 * state.last,
    "lfu, fading": lambda state: state.faded,
    "smoothed margin": lambda state: state.margin,
    "lru, then margin": lambda state: state.last + 1e-2 * np.clip(state.margin, -50, 0),
    "fading + margin": lambda state: state.faded + 0.1 * np.clip(state.margin, -50, 0),
}


def replay(trace: Trace, rule: Score, budget: int, tokens: int, warm: NDArray[np.int64]) -> float:
    """Hit rate of one head's trace; ``warm`` is resident at first."""
    state = State(tokens)
    resident = np.zeros(tokens, dtype=bool)
    resident[warm] = True
    hits = wanted_total = 0
    for step, (wanted, margin) in enumerate(trace):
        hits += int(resident[wanted].sum())
        wanted_total += len(wanted)
        state.see(step, wanted, margin)
        resident[wanted] = True
        surplus = int(resident.sum()) - budget
        if surplus > 0:
            held = np.flatnonzero(resident)
            score = rule(state)[held]
            score[np.isin(held, wanted, assume_unique=True)] = np.inf
            resident[held[np.argpartition(score, surplus)[:surplus]]] = False
    return hits / max(1, wanted_total)


@torch.no_grad()
def record(options: argparse.Namespace) -> tuple[dict[tuple[int, int], Trace], int]:
    """Traces by layer and head, and the number of tokens at the end."""
    loaded = load_model("smollm2", dtype=torch.bfloat16)
    calibration = calibrate(loaded.model, loaded.tokenizer)
    ids = loaded.tokenizer(documentation_text()[:200_000], verbose=False)["input_ids"]
    prompt = torch.tensor(ids[: options.prompt_tokens])[None]
    traces: dict[tuple[int, int], Trace] = {}
    config = InfiniGenConfig()
    with attach(loaded.model, calibration, config) as session:
        cache = session.new_cache(tokens=options.prompt_tokens + options.steps)
        token = prefill(session, cache, prompt).argmax(-1)
        watched = {id(layer.policy): layer.spec.index for layer in cache.offloaded}
        own_scores = InfiniGenPolicy._scores
        seen: dict[int, Any] = {}

        def scores(policy: InfiniGenPolicy, query: Any) -> Any:
            found = own_scores(policy, query)
            seen[watched[id(policy)]] = group_margin(found.clone())[0, :, 0].float().numpy()
            return found

        InfiniGenPolicy._scores = scores  # type: ignore[method-assign]
        try:
            for step in range(options.steps):
                seen.clear()
                token = forward(loaded.model, token, cache).argmax(-1)
                for layer, margins in seen.items():
                    for head, margin in enumerate(margins):
                        old = len(margin) - config.recent_tokens
                        wanted = np.flatnonzero(margin[:old] > -config.alpha)
                        traces.setdefault((layer, head), []).append((wanted, margin))
                print(f"\rstep {step + 1}", end="", file=sys.stderr)
        finally:
            InfiniGenPolicy._scores = own_scores  # type: ignore[method-assign]
    print(file=sys.stderr)
    return traces, options.prompt_tokens + options.steps


def main() -> None:
    """Record and replay."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--budget", type=float, default=0.2)
    options = parser.parse_args()
    traces, tokens = record(options)
    budget = int(options.budget * options.prompt_tokens)
    result: dict[str, dict[str, float]] = {}
    for start in ("cold", "warm"):
        result[start] = {}
        for name, rule in RULES.items():
            rates = [
                replay(trace, rule, budget, tokens, warm_start(trace, budget, start))
                for trace in traces.values()
            ]
            result[start][name] = float(np.mean(rates))
            print(f"{start:5} {name:18} {result[start][name]:.4f}", file=sys.stderr)
    print(json.dumps({"budget": options.budget, "steps": options.steps, "hit_rate": result}))


def warm_start(trace: Trace, budget: int, start: str) -> NDArray[np.int64]:
    """Tokens that are resident at first: none, or those that the first step liked best."""
    if start == "cold":
        return np.zeros(0, dtype=np.int64)
    return np.argsort(-trace[0][1])[:budget]


if __name__ == "__main__":
    main()
