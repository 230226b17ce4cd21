"""The rehearsal beside the truth: the engine's own choices and the model's own scores."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from calibrating import calibrate_tiny, covering, selecting, tokens
from command_line import TEXT, tokenizer
from infinigen_kv import Calibration, StorageConfig, attach
from infinigen_kv.attention.dense import grouped_scores
from infinigen_kv.cache.forward import forward, prefill
from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.errors import InputError
from infinigen_kv.rehearsal.select import select_tokens, selection_mask
from infinigen_kv_lab.evals.probe import LayerProbe, watching
from infinigen_kv_lab.evals.registry import make_task
from infinigen_kv_lab.evals.run import Subject, evaluate
from infinigen_kv_lab.evals.speculation import QUERIES, Speculation, SpeculationTask
from infinigen_kv_lab.evals.task import Inputs, TaskOptions
from stepping import decode_step
from tiny import TINY

PROMPT, DECODED = 50, 20
IDS = tokens(1, PROMPT + DECODED, seed=8)[0]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("rehearsal", ["calibrated", "paper"])
@torch.no_grad()
def test_the_probe_scores_as_the_engine_does(family: str, rehearsal: str) -> None:
    """The first layer that selects has inputs that no selection has touched."""
    model = TINY[family]()
    calibration = calibrate_tiny(model)
    config = selecting(rehearsal=rehearsal)
    first = 1  # attends to everything in all of these families
    found: dict[int, Tensor] = {}
    with attach(model, calibration, config) as session:
        cache = session.new_cache()
        prefill(session, cache, IDS[None, :PROMPT])
        cache.recorder = recorder = FetchRecorder(keep_indices=True)
        with cache.decoding():
            forward(model, IDS[None, PROMPT:], cache)

        def see(layer: int, hidden: Tensor, query: Tensor, keys: Tensor) -> None:
            if layer != first:
                return
            probe = LayerProbe(
                session.adapter.layers[layer],
                session.adapter,
                calibration.layers[layer],
                config,
                hidden=hidden,
                query=query,
                keys=keys,
                prompt=PROMPT,
            )
            forwarded = decode_step(config, PROMPT, DECODED)
            scores = probe.scores(forwarded).engine
            chosen = select_tokens(scores, forwarded.candidates, config.alpha_of(layer))
            found[layer] = selection_mask(chosen, IDS.numel())

        with watching(model, session.adapter, see):
            session.adapter.decoder(input_ids=IDS[None], use_cache=False)
    engine = next(each for layer, each in recorder.selections if layer == first)
    assert torch.equal(found[first], selection_mask(engine, IDS.numel()))
    assert 0 < found[first].double().mean() < 0.35


@pytest.mark.parametrize("family", TINY)
@torch.no_grad()
def test_watching_changes_nothing_and_leaves_nothing(family: str) -> None:
    model = TINY[family]()
    seen: dict[int, tuple[int, ...]] = {}

    def see(layer: int, hidden: Tensor, query: Tensor, keys: Tensor) -> None:
        seen[layer] = (hidden.shape[1], query.shape[2], keys.shape[2])

    before = model(input_ids=IDS[None]).logits
    with attach(model) as session:
        with watching(model, session.adapter, see):
            inside = model(input_ids=IDS[None]).logits
        hooks = sum(len(m._forward_pre_hooks) for m in model.modules())
        with pytest.raises(ZeroDivisionError), watching(model, session.adapter, see):
            raise ZeroDivisionError
        assert sum(len(m._forward_pre_hooks) for m in model.modules()) == hooks
        after = model(input_ids=IDS[None]).logits
    assert seen == {layer: (IDS.numel(),) * 3 for layer in range(1, 4)}
    torch.testing.assert_close(inside, before, rtol=0, atol=1e-4)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)


def task(ids: Tensor = IDS, window: int = 70, prompt: int = PROMPT) -> SpeculationTask:
    return SpeculationTask(ids, window=window, prompt_tokens=prompt, source="x")


def test_all_dimensions_leave_only_the_error_of_the_query(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    """With R = D the partial score is the whole one, up to a constant for each query."""
    config = covering(partial_ratio=1.0, alpha=2.0, max_fetch=0.3, min_context=8)
    subject = Subject(model, calibration, config, StorageConfig())
    (point,) = evaluate(subject, task(), ["ideal", "infinigen"])
    found = point.result
    assert isinstance(found, Speculation) and point.policy == "infinigen"
    assert found.layers == (1, 2, 3)
    assert found.true_query.recall.mean.value == pytest.approx(1.0, abs=0.02)
    assert found.true_query.rank_correlation.mean.value == pytest.approx(1.0, abs=1e-3)
    assert found.true_query.divergence.mean.value == pytest.approx(0.0, abs=1e-3)
    assert found.true_query.coverage.mean.value == pytest.approx(
        found.best_coverage.mean.value, abs=1e-3
    )
    for name in ("recall", "coverage", "rank_correlation", "divergence"):
        engine, prediction = getattr(found.engine, name), getattr(found.all_dimensions, name)
        assert engine.mean.value == pytest.approx(prediction.mean.value, abs=0.02)
    assert found.engine.recall.mean.value < 0.99
    assert np.shape(found.engine.recall.values) == (3, 2)
    assert np.shape(found.engine.coverage.values) == (3, 4)
    assert len(found.chosen) == 3 and all(0 < share <= 0.3 for share in found.chosen)


def test_windows_and_policies_that_cannot_be_measured(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    with pytest.raises(InputError, match=f"at least {QUERIES} tokens after the prompt"):
        task(window=60)
    with pytest.raises(InputError, match="whole window"):
        task(window=71)
    subject = Subject(model, calibration, selecting(), StorageConfig())
    with pytest.raises(InputError, match="suits none"):
        evaluate(subject, task(), ["h2o", "oracle"])


def test_the_text_is_the_users_or_the_data_folders(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text(TEXT, encoding="utf-8")
    options = TaskOptions(text=path, window=200)
    made = make_task("speculation", Inputs(tokenizer(), 512, None, options))
    assert len(made) == len(TEXT) // 200
    assert made.settings["prompt_tokens"] == 133
    with pytest.raises(InputError, match="--text FILE"):
        make_task("speculation", Inputs(tokenizer(), 512, None, TaskOptions()))


def test_true_scores_are_the_models_own(model: PreTrainedModel) -> None:
    """`watching` hands out queries and keys after RoPE: their softmax is the attention."""
    found: dict[int, Tensor] = {}

    def see(layer: int, hidden: Tensor, query: Tensor, keys: Tensor) -> None:
        scores = grouped_scores(query, keys, query.shape[-1] ** -0.5, None)
        hidden_tokens = torch.ones(IDS.numel(), IDS.numel(), dtype=torch.bool).triu(1)
        found[layer] = scores.masked_fill(hidden_tokens, -math.inf).softmax(-1).flatten(1, 2)

    with torch.no_grad(), attach(model) as session, watching(model, session.adapter, see):
        session.adapter.decoder(input_ids=IDS[None], use_cache=False)
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            expected = model(input_ids=IDS[None], output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    for layer, weights in found.items():
        torch.testing.assert_close(weights, expected[layer], rtol=0, atol=1e-4)
