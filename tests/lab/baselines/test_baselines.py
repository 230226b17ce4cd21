"""The compared policies in the running engine, against plain Python over sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

import tiny
from both_kernels import both_kernels  # noqa: F401
from calibrating import calibrate_tiny, left_padded, run, selecting, tokens
from infinigen_kv import attach
from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.kernels.reference import TorchKernels
from infinigen_kv.policies import settings
from infinigen_kv.policies.infinigen import InfiniGenPolicy
from infinigen_kv.policies.rehearsal_layer import RehearsalLayer
from infinigen_kv.policies.step import Step
from infinigen_kv.storage.pools.local import LocalPool
from infinigen_kv_lab.baselines.oracle import OraclePolicy
from infinigen_kv_lab.baselines.scoring import Scoring
from naive_baselines import (
    Chooser,
    NaiveBaseline,
    NaiveH2O,
    NaiveQuest,
    NaiveScissorhands,
    NaiveStreaming,
)
from selections import as_sets

PROMPT, STEPS = 60, 8
PADDING = (0, 13)
MIN_CONTEXT = 50  # the shorter row begins to select in the middle of the steps
PUBLISHED = settings.PolicySettings()
NAIVE: dict[str, Callable[[float], Chooser]] = {
    "h2o": lambda share: NaiveH2O(share, MIN_CONTEXT),
    "scissorhands": lambda share: NaiveScissorhands(
        share, MIN_CONTEXT, PUBLISHED.history, PUBLISHED.recent
    ),
    "streaming-llm": lambda share: NaiveStreaming(share, MIN_CONTEXT, PUBLISHED.sinks),
    "quest": lambda share: NaiveQuest(share, MIN_CONTEXT, PUBLISHED.page_tokens),
    "paging-h2o": lambda share: NaiveH2O(share, MIN_CONTEXT),
}


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt"])
@pytest.mark.parametrize("policy", NAIVE)
@pytest.mark.parametrize("budget", [0.03, 0.3])
def test_policies_equal_plain_loops(family: str, policy: str, budget: float) -> None:
    model = tiny.TINY[family]()
    calibration = calibrate_tiny(model)
    config = selecting(min_context=MIN_CONTEXT)
    ids, mask = left_padded(tokens(2, PROMPT + STEPS), PADDING)
    naive = NaiveBaseline(model, config, lambda: NAIVE[policy](budget))
    naive.padding = PADDING
    with naive.running():
        expected = run(model, DynamicCache(config=model.config), ids, mask, prompt=PROMPT)
    with attach(model, calibration, config) as session:
        cache = session.new_cache(policy=policy, budget=budget)
        cache.recorder = recorder = FetchRecorder(keep_indices=True)
        actual = run(model, cache, ids, mask, prompt=PROMPT)
        cache.close()
    selected = as_sets(recorder, PADDING, first=PROMPT)
    assert len(naive.chosen) == len(selected)
    per_step = len(naive.chosen) // STEPS
    for number, (layer, row, heads) in enumerate(naive.chosen):
        at = PROMPT + number // per_step - PADDING[row]
        assert selected[layer, row, at] == heads, (layer, row, at)
    assert_close(actual[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)


def test_a_short_history_forgets() -> None:
    """The window of Scissorhands, here much shorter than the prompt."""
    model = tiny.llama()
    calibration = calibrate_tiny(model)
    config = selecting(min_context=8)
    ids = tokens(1, PROMPT + STEPS)
    short = settings.PolicySettings(history=5, recent=2, budget=0.3)
    naive = NaiveBaseline(
        model, config, lambda: NaiveScissorhands(0.3, 8, short.history, short.recent)
    )
    with naive.running():
        run(model, DynamicCache(config=model.config), ids, prompt=PROMPT)
    with attach(model, calibration, config) as session, pytest.MonkeyPatch.context() as patch:
        patch.setattr("infinigen_kv.session.attach.PolicySettings", lambda **given: short)
        cache = session.new_cache(policy="scissorhands")
        cache.recorder = recorder = FetchRecorder(keep_indices=True)
        run(model, cache, ids, prompt=PROMPT)
    selected = as_sets(recorder, (0,), first=PROMPT)
    per_step = len(naive.chosen) // STEPS
    for number, (layer, row, heads) in enumerate(naive.chosen):
        assert selected[layer, row, PROMPT + number // per_step] == heads


# The oracle.


@pytest.mark.parametrize("padding", [(0, 0), (0, 9)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_oracle_takes_infinigens_count_and_the_true_order(
    padding: tuple[int, int], softcap: float | None
) -> None:
    rows, heads, kv_heads, dim, count = 2, 6, 2, 16, 30
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    predicted, truth = random(rows, heads, 1, dim), random(rows, heads, 1, dim)
    keys, prompt_query = random(rows, kv_heads, count, dim), random(rows, heads, count, dim)
    visible = torch.arange(count + 1) >= torch.tensor(padding)[:, None]
    config = selecting(max_fetch=1.0)
    layer = RehearsalLayer(
        lambda hidden, step: predicted, None, scaling=0.3, softcap=softcap, alpha=1.5
    )

    def made() -> InfiniGenPolicy:
        return InfiniGenPolicy(layer, config, TorchKernels())

    infinigen, oracle = made(), OraclePolicy(made(), Scoring(0.3, softcap))
    pool = LocalPool(keys, keys)
    pool.append(keys, keys)
    step = _step(config, visible, start=count, queries=1)
    for policy in (infinigen, oracle):
        prompt = _step(config, visible[:, :count], start=0, queries=count)
        policy.observe(prompt_query, keys, keys, prompt, pool, None)
    theirs = infinigen.rehearse(predicted, step, pool)
    assert oracle.rehearse(predicted, step, pool) is None
    ours = oracle.select_at_layer(truth, step, pool)
    assert theirs is not None and ours is not None
    for row, pad in enumerate(padding):
        number = theirs.index.shape[3] if theirs.counts is None else int(theirs.counts[row])
        for head in range(kv_heads):
            scores = (0.3 * truth[row, 3 * head : 3 * head + 3, 0]) @ keys[row, head, pad:].T
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            margin = (scores - scores.amax(-1, keepdim=True)).amax(0)
            expected = set((margin.topk(number).indices + pad).tolist())
            assert set(ours.index[row, head, 0, :number].tolist()) == expected
    assert ours.counts is None or theirs.counts is not None
    if theirs.counts is not None:
        assert ours.counts is not None and ours.counts.tolist() == theirs.counts.tolist()


def _step(config: Any, visible: Tensor, *, start: int, queries: int) -> Step:
    return Step(
        start=start,
        queries=queries,
        rows=2,
        visible=None if bool(visible.all()) else visible,
        position_ids=torch.arange(start, start + queries)[None],
        selecting=queries == 1,
        config=config,
    )
