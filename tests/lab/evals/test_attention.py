"""Attention over what is kept: with a policy whose choice is known, and the model's own weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from calibrating import calibrate_tiny, selecting, tokens
from infinigen_kv import StorageConfig
from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.attention import STEPS, AttentionTask, Kept
from infinigen_kv_lab.evals.run import Subject, evaluate
from own_attention import own_weights
from tiny import TINY, llama

PROMPT, DECODED = 50, 40
WINDOW = PROMPT + DECODED
IDS = tokens(1, 2 * WINDOW, seed=5)[0]
BUDGET, SINKS = 0.3, 4


def measured(model: Any, policies: list[str], **changes: Any) -> dict[str, Kept]:
    task = AttentionTask("attention", IDS, window=WINDOW, prompt_tokens=PROMPT, source="x")
    config = selecting(**changes)
    subject = Subject(model, calibrate_tiny(model), config, StorageConfig(), BUDGET)
    found = {}
    for point in evaluate(subject, task, policies):
        assert isinstance(point.result, Kept)
        found[point.policy] = point.result
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_a_window_and_sinks_in_plain_loops(family: str) -> None:
    """StreamingLLM keeps the same tokens in every head: the first ones and the newest."""
    model = TINY[family]()
    result = measured(model, ["streaming-llm"])["streaming-llm"]
    assert result.windows == 2 and result.layers == (1, 2, 3)
    similarity, mass = np.zeros((2, 3, DECODED)), np.zeros((2, 3, DECODED))
    for window in range(2):
        weights = own_weights(model, IDS[window * WINDOW : (window + 1) * WINDOW])
        for layer in (1, 2, 3):
            for step in range(DECODED):
                query = PROMPT + step
                budget = int(BUDGET * query)
                recent = range(query - (budget - SINKS), query + 1)
                seen = sorted({*range(SINKS), *recent})
                values = []
                for row in weights[layer][:, query]:
                    ours = np.zeros_like(row)
                    ours[seen] = row[seen] / row[seen].sum()
                    cosine = row @ ours / np.linalg.norm(row) / np.linalg.norm(ours)
                    values.append((cosine, row[seen].sum()))
                similarity[window, layer - 1, step], mass[window, layer - 1, step] = np.mean(
                    values, axis=0
                )
    assert result.similarity.values == pytest.approx(similarity.mean(axis=(0, 2)), abs=1e-4)
    assert result.mass.values == pytest.approx(mass.mean(axis=(0, 2)), abs=1e-4)
    course = similarity.mean(axis=(0, 1))
    expected = [course[at : at + STEPS].mean() for at in range(0, DECODED, STEPS)]
    assert [each.value for each in result.course] == pytest.approx(expected, abs=1e-4)
    assert result.course[0].low < expected[0] < result.course[0].high


def test_whoever_keeps_everything_has_the_same_attention() -> None:
    found = measured(llama(), ["infinigen"], alpha=1e6, max_fetch=1.0)["infinigen"]
    assert found.similarity.mean.value == pytest.approx(1.0, abs=1e-6)
    assert found.mass.mean.value == pytest.approx(1.0, abs=1e-6)


def test_no_choice_of_as_many_covers_more_than_the_true_scores() -> None:
    """With one query head for each KV head the oracle's choice has the largest mass."""
    model = llama(num_key_value_heads=4)
    found = measured(model, ["oracle", "infinigen", "h2o"], alpha=1e6, max_fetch=BUDGET)
    oracle = found["oracle"]
    assert oracle.fetched_share == pytest.approx(found["infinigen"].fetched_share)
    for name in ("infinigen", "h2o"):
        assert found[name].layers == (1, 2, 3)
        assert oracle.mass.mean.value >= found[name].mass.mean.value


def test_what_cannot_be_measured() -> None:
    with pytest.raises(InputError, match="suits none"):
        measured(llama(), ["ideal", "stream"])
    with pytest.raises(InputError, match="did not select in all steps: choose a longer prompt"):
        measured(llama(), ["infinigen"], min_context=100)
    task = AttentionTask("attention", IDS, window=WINDOW, prompt_tokens=PROMPT, source="x")
    model = llama()
    storage = StorageConfig(capacity=0.5)
    subject = Subject(model, calibrate_tiny(model), selecting(), storage)
    with pytest.raises(InputError, match="without a capacity"):
        evaluate(subject, task, ["infinigen"])
