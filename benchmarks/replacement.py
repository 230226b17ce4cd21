"""Hit rates of replacement rules for the resident set, on recorded selections of SmolLM2.

    python benchmarks/replacement.py [--prompt-tokens 4096] [--steps 96] [--budget 0.2]

Records what every decode step selects and the margins that it selected by, then replays the record
with each rule. The always-kept window is left out: the ring holds it. One JSON object on stdout.

Also replays what is kept of a home that is read by tokens, where an entry comes with those of the
token's other heads: the wanted entries alone, those of the other heads too, as if used some steps
ago (each head evicts for itself), or whole tokens. ``reads`` are the distinct tokens that a layer
reads in a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infinigen_kv import InfiniGenConfig, attach, calibrate, load_model
from infinigen_kv.cache.forward import forward, prefill
from infinigen_kv.calibration.texts import documentation_text
from infinigen_kv.kernels.reference import TorchKernels
from infinigen_kv.policies.infinigen import InfiniGenPolicy
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.select import Candidates, Selection, group_margin, select_tokens

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


KEPT = ["wanted entries", *(f"other heads, age {age}" for age in (0.5, 4, 16)), "whole tokens"]


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


def replay_tokens(
    heads: list[Trace], kept: str, budget: int, tokens: int, warm: list[NDArray[np.int64]]
) -> tuple[float, float]:
    """Hit rate and ``reads`` of one layer, least recently used out first; ``warm`` by head."""
    last = np.full((len(heads), tokens), -np.inf)
    whole = kept == "whole tokens"
    if whole:  # the best of each head in turn
        in_turn = np.array(list(dict.fromkeys(np.stack(warm).T.ravel().tolist()))[:budget])
        warm = [in_turn] * len(heads)
    for head, best_first in enumerate(warm):
        last[head, best_first] = -np.arange(len(best_first))
    hits = total = reads = 0
    for step in range(len(heads[0])):
        wanted = [trace[step][0] for trace in heads]
        lacked = [w[np.isinf(last[head, w])] for head, w in enumerate(wanted)]
        total += sum(map(len, wanted))
        hits += sum(map(len, wanted)) - sum(map(len, lacked))
        read = np.unique(np.concatenate(lacked))
        reads += len(read)
        if kept.startswith("other heads"):
            others = np.isinf(last[:, read])
            last[:, read] = np.where(others, step + 1 - float(kept.split()[-1]), last[:, read])
        for head, w in enumerate(wanted):
            last[slice(None) if whole else head, w] = step + 1
        surplus = np.isfinite(last).sum(axis=1) - budget
        for head in np.flatnonzero(surplus > 0):
            held = np.flatnonzero(np.isfinite(last[head]))
            oldest = np.argsort(last[head, held], kind="stable")[: surplus[head]]
            last[head, held[oldest]] = -np.inf
    return hits / max(1, total), reads / len(heads[0])


class Watching(TorchKernels):
    """Keeps the margins ``(H_kv, S)`` of the latest choice, of a batch of one row."""

    margins: NDArray[np.float32]

    def select_tokens(
        self,
        query: Tensor,
        keys: PartialKeys,
        candidates: Candidates,
        *,
        scaling: float,
        alpha: float,
        softcap: float | None,
    ) -> Selection:
        """As `TorchKernels` does it."""
        scores = keys.scores(query, scaling, softcap)
        self.margins = group_margin(scores)[0, :, 0].numpy()
        return select_tokens(scores, candidates, alpha)


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
        watching = {}
        for layer in cache.offloaded:
            if isinstance(layer.policy, InfiniGenPolicy):
                layer.policy._kernels = watching[layer.spec.index] = Watching()
        for step in range(options.steps):
            token = forward(loaded.model, token, cache).argmax(-1)
            for layer_index, kernels in watching.items():
                for head, margin in enumerate(kernels.margins):
                    old = len(margin) - config.recent_tokens
                    wanted = np.flatnonzero(margin[:old] > -config.alpha)
                    traces.setdefault((layer_index, head), []).append((wanted, margin))
            print(f"\rstep {step + 1}", end="", file=sys.stderr)
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
    by_tokens = {kept: _mean_of_layers(traces, kept, budget, tokens) for kept in KEPT}
    for kept, (rate, reads) in by_tokens.items():
        print(f"{kept:24} {rate:.4f} {reads:6.1f} reads", file=sys.stderr)
    settings = {"budget": options.budget, "steps": options.steps}
    print(json.dumps({**settings, "hit_rate": result, "hit_rate_and_reads": by_tokens}))


def _mean_of_layers(
    traces: dict[tuple[int, int], Trace], kept: str, budget: int, tokens: int
) -> list[float]:
    found = []
    for layer in sorted({layer for layer, _ in traces}):
        heads = [trace for key, trace in sorted(traces.items()) if key[0] == layer]
        warm = [warm_start(trace, budget, "warm") for trace in heads]
        found.append(replay_tokens(heads, kept, budget, tokens, warm))
    return np.mean(found, axis=0).tolist()


def warm_start(trace: Trace, budget: int, start: str) -> NDArray[np.int64]:
    """Tokens that are resident at first: none, or those that the first step liked best."""
    if start == "cold":
        return np.zeros(0, dtype=np.int64)
    return np.argsort(-trace[0][1])[:budget]


if __name__ == "__main__":
    main()
