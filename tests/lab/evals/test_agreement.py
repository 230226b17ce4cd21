"""Measures of a rehearsal's scores against plain loops over heads, queries and tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from calibrating import selecting
from infinigen_kv_lab.evals.agreement import compare, jensen_shannon
from infinigen_kv_lab.evals.probe import Scores
from stepping import decode_step

PROMPT, DECODED = 50, 20


def random_scores(seed: int, heads: int = 2, group: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = 1, heads, group, DECODED, PROMPT + DECODED
    return 3 * torch.randn(shape, generator=generator)


def test_measures_are_those_of_plain_loops() -> None:
    config = selecting(alpha=3.0)
    true, engine, other = (random_scores(seed) for seed in range(3))
    engine = true + 0.5 * engine
    forwarded = decode_step(config, PROMPT, DECODED)
    scores = Scores(true.clone(), engine.clone(), other.clone(), engine.clone())
    found = compare(scores, forwarded, config.alpha_of(1))
    assert torch.equal(scores.true, true) and torch.equal(scores.engine, engine)
    names = {"engine": engine, "true_query": other}
    for name, mine in names.items():
        expected = [measure_one(true, mine, engine, kv, config) for kv in range(2)]
        for key in ("recall", "coverage", "rank_correlation", "divergence"):
            values = [value for each in expected for value in each[key]]
            assert found[f"{name}.{key}"] == pytest.approx(values, abs=1e-5), (name, key)
    best = [
        value
        for kv in range(2)
        for value in measure_one(true, true, engine, kv, config)["coverage"]
    ]
    assert found["best_coverage"] == pytest.approx(best, abs=1e-5)
    for name in names:
        pairs = zip(found[f"{name}.coverage"], found["best_coverage"], strict=True)
        assert sum(ours for ours, _ in pairs) < sum(found["best_coverage"])


def measure_one(
    true: Tensor, mine: Tensor, engine: Tensor, kv: int, config: object
) -> dict[str, list[float]]:
    """One KV head in float64 NumPy: recall, and per query head the other three."""
    recalls: list[float] = []
    by_query: dict[str, list[list[float]]] = {
        name: [] for name in ("coverage", "rank_correlation", "divergence")
    }
    alpha, recent, sinks = 3.0, 2, 1
    for place in range(DECODED):
        count_of = PROMPT + place  # tokens before the query
        kept = {*range(sinks), *range(count_of - recent, count_of)}
        counts = []
        for head in range(true.shape[1]):
            margin = margins(engine[0, head, :, place, :count_of], kept)
            counts.append(int((margin > -alpha).sum()))
        count = round(sum(counts) / len(counts))
        count = max(len(kept), min(count, math.floor(0.3 * count_of)))
        chosen = top(margins(mine[0, kv, :, place, :count_of], kept), count)
        best = top(margins(true[0, kv, :, place, :count_of], kept), count)
        if best - kept:
            recalls.append(len((best & chosen) - kept) / len(best - kept))
        rows: dict[str, list[float]] = {name: [] for name in by_query}
        for group in range(true.shape[2]):
            real = true[0, kv, group, place].double().numpy()
            guess = mine[0, kv, group, place, :count_of].double().numpy()
            weights = softmax(real[: count_of + 1])
            rows["coverage"].append(weights[[*chosen, count_of]].sum())
            ranks = [np.argsort(np.argsort(each)) for each in (real[:count_of], guess)]
            correlations = np.atleast_2d(np.corrcoef(np.stack(ranks)))
            rows["rank_correlation"].append(float(correlations[0, 1]))
            p, q = softmax(real[:count_of]), softmax(guess)
            middle = (p + q) / 2
            rows["divergence"].append(
                float((p * np.log(p / middle)).sum() + (q * np.log(q / middle)).sum()) / 2
            )
        for name, values in rows.items():
            by_query[name].append(values)
    means = {name: np.mean(values, axis=0).tolist() for name, values in by_query.items()}
    return {"recall": [float(np.mean(recalls))], **means}


def margins(scores: Tensor, kept: set[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    values = scores.double().numpy()
    margin = (values - values.max(axis=1, keepdims=True)).max(axis=0)
    margin[sorted(kept)] = np.inf
    return margin


def top(margin: np.ndarray[tuple[int], np.dtype[np.float64]], count: int) -> set[int]:
    return set(np.argsort(-margin, kind="stable")[:count].tolist())


def softmax(
    values: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def test_jensen_shannon_divergence_of_simple_distributions() -> None:
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert jensen_shannon(one, one).item() == 0.0
    assert jensen_shannon(one, other).item() == pytest.approx(math.log(2))
