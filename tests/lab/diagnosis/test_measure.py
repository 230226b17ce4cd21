"""The whole diagnosis of tiny models, against the measures it is put together from."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

import tiny
from calibrating import calibrate_tiny, selecting, tokens
from infinigen_kv import InfiniGenConfig, attach, calibrate
from infinigen_kv.calibration.texts import documentation_text
from infinigen_kv.errors import InfiniGenError, InputError
from infinigen_kv.models.loading import LoadedModel
from infinigen_kv_lab.bench.fidelity import measure_fidelity
from infinigen_kv_lab.diagnosis import Diagnosis, ResidentTrial, Thresholds, Windows, diagnose
from infinigen_kv_lab.diagnosis.layerwise import LayerwiseKL
from infinigen_kv_lab.diagnosis.measure import HARM_TOKENS

PROMPT, DECODED = 60, 32
IDS = tokens(1, 5 * (PROMPT + DECODED), seed=2)[0].tolist()


def windows(count: int = 1) -> Windows:
    return Windows.spread(IDS, prompt=PROMPT, decoded=DECODED, count=count)


def run(model: PreTrainedModel, config: InfiniGenConfig | None = None, count: int = 1) -> Diagnosis:
    return diagnose(model, calibrate_tiny(model), windows(count), config or selecting())


def test_windows_are_spread_over_the_text() -> None:
    ids = list(range(110))
    made = Windows.spread(ids, prompt=10, decoded=40, count=1)
    assert made.ids.tolist() == [ids[:50]]
    both = Windows.spread(ids, prompt=10, decoded=40, count=9)
    assert both.ids.tolist() == [ids[:50], ids[50:100]] and both.prompt == 10
    four = Windows.spread(list(range(400)), prompt=10, decoded=40, count=4)
    assert four.ids[:, 0].tolist() == [0, 100, 200, 300]


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"prompt": 80, "decoded": 40, "count": 1}, "has 110 tokens, and one window takes 120"),
        ({"prompt": 0, "decoded": 40, "count": 1}, "prompt=0"),
        ({"prompt": 10, "decoded": 31, "count": 1}, "at least 1, 32 and 1"),
        ({"prompt": 10, "decoded": 40, "count": 0}, "count=0"),
    ],
)
def test_windows_that_cannot_be_made(numbers: dict[str, int], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Windows.spread(list(range(110)), **numbers)


def test_the_whole_model_is_what_fidelity_measures() -> None:
    model = tiny.llama()
    found = run(model)
    for name, config in (
        ("infinigen", selecting()),
        ("infinigen-paper", InfiniGenConfig(rehearsal="paper", max_fetch=0.3, min_context=8)),
    ):
        expected = measure_fidelity(
            model, calibrate_tiny(model), config, windows().ids[0], prompt_tokens=PROMPT
        )
        ours = found.policies[name]
        assert ours.kl.value == pytest.approx(expected.kl_mean, rel=1e-3)
        assert ours.fetched == pytest.approx(expected.fetched_share)
        assert ours.fetched_all_layers == pytest.approx(expected.fetched_share_all_layers)
        assert ours.top1_same == expected.top1_same
        assert ours.ratio.value == pytest.approx(expected.ppl / expected.ppl_full, rel=1e-3)
    assert found.evidence.kl == found.policies["infinigen"].kl.value
    assert found.evidence.fetched == found.policies["infinigen"].fetched
    assert found.policies["oracle"].kl.value > 0
    assert found.policies["oracle"].fetched == pytest.approx(found.evidence.fetched, abs=0.02)
    assert found.evidence.full_layers == (0,)
    assert found.unselected == {0: "first layer: no predecessor to rehearse from"}
    assert found.evidence.trial is not None
    worst = max(found.layers, key=lambda each: each.harm).layer
    assert found.evidence.trial.layers == (worst,)


def test_layers_are_tried_on_other_tokens_than_those_that_chose_them() -> None:
    model, config = tiny.llama(), selecting()
    calibration = calibrate_tiny(model)
    found = diagnose(model, calibration, windows(2), config)
    first, last = windows(2).ids
    with attach(model, calibration, config) as session:
        meters = [
            LayerwiseKL(session, ids[:PROMPT], ids[PROMPT:][:HARM_TOKENS]) for ids in (first, last)
        ]
        harm = {layer: meters[0].kl({layer}) for layer in (1, 2, 3)}
        worst = max(harm, key=harm.__getitem__)
        kept = meters[1].kl({1, 2, 3} - {worst})
        everywhere = meters[1].kl({1, 2, 3})
    assert {each.layer: each.harm for each in found.layers} == pytest.approx(harm)
    assert found.evidence.trial == ResidentTrial((worst,), everywhere, kept)
    assert kept < everywhere


@pytest.mark.parametrize("family", tiny.TINY)
def test_every_family_can_be_diagnosed_and_none_of_them_suits(family: str) -> None:
    """Random weights: nothing there is predictable or concentrated."""
    model = tiny.TINY[family]()
    sliding = [
        spec
        for spec, kind in enumerate(getattr(model.config, "layer_types", None) or ())
        if kind == "sliding_attention"
    ]
    if family == "mistral_sliding":
        with pytest.raises(InputError, match="none of the model's 4 layers can select"):
            run(model)
        return
    found = run(model)
    measured = {each.layer for each in found.layers}
    assert measured | set(found.unselected) == set(range(4))
    assert measured == set(range(1, 4)) - set(sliding)
    assert all("sliding window" in found.unselected[layer] for layer in sliding)
    assert set(found.evidence.full_layers) == set(found.unselected) - set(sliding)
    assert found.verdict.level in ("suitable with care", "unsuitable")
    assert found.verdict.weak and found.verdict.advice
    assert all(len(each.head_coverage) == 4 for each in found.layers)
    for each in found.layers:
        assert 0 < each.coverage <= each.best_coverage + 1e-6 <= 1 + 1e-5


def test_windows_are_averaged_and_json_is_strict() -> None:
    found = run(tiny.qwen3(), count=3)
    assert (found.windows, found.prompt_tokens, found.decoded_tokens) == (3, PROMPT, DECODED)
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    layers = values["evidence"]["layers"]
    assert [each["layer"] for each in layers] == [1, 2, 3]
    assert values["policies"]["infinigen"]["kl"]["low"] is not None
    assert values["verdict"]["level"] == found.verdict.level
    assert values["unselected"].keys() == {"0"}


def test_the_papers_rehearsal_is_not_measured_twice() -> None:
    found = run(tiny.llama(), selecting(rehearsal="paper"))
    assert found.policies.keys() == {"infinigen", "oracle"}


def test_layers_below_the_first_and_thresholds_of_the_callers_own() -> None:
    model = tiny.llama()
    config = selecting(first_layer=3)
    lenient = Thresholds(*cast(Any, [(1e9, 1e9)] * 3 + [1e9] * 7))
    found = diagnose(model, calibrate_tiny(model), windows(), config, thresholds=lenient)
    assert found.unselected[2] == "below first_layer=3"
    assert [each.layer for each in found.layers] == [3]
    assert found.evidence.trial is None  # there is no other layer
    assert found.verdict.level == "suitable" and not found.verdict.weak


@pytest.mark.parametrize(
    ("build", "config", "reason"),
    [
        (lambda: tiny.llama(num_hidden_layers=1), selecting(), "none of the model's 1 layers"),
        (tiny.llama, selecting(first_layer=4), "none of the model's 4 layers"),
        (
            lambda: tiny.llama(max_position_embeddings=64),
            selecting(),
            "92 tokens is longer than the model's 64 positions",
        ),
        (tiny.llama, selecting(min_context=61), "nothing is selected before the context has 61"),
    ],
)
def test_what_cannot_be_measured(
    build: Callable[[], PreTrainedModel], config: InfiniGenConfig, reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        run(build(), config)


def test_a_model_that_computes_nan_gets_no_verdict() -> None:
    model = tiny.llama()
    made = calibrate_tiny(model)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(InfiniGenError, match="logits contain NaN or infinity"):
        diagnose(model, made, windows(), selecting())


def test_the_model_is_left_as_it_was() -> None:
    model = tiny.llama()
    ids = torch.tensor(IDS[:40])[None]
    before = model(input_ids=ids).logits
    run(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert all(not module._forward_pre_hooks for module in model.modules())


@pytest.mark.model
@pytest.mark.slow
def test_what_is_known_of_smollm2_shows(smollm2: LoadedModel) -> None:
    """Layers 0 and 1 have inputs that are nearly orthogonal, which the correction makes up for."""
    model, tokenizer = smollm2.model, smollm2.tokenizer
    calibration = calibrate(model, tokenizer, tokens=4096, window=512, use_cache=False)
    ids = tokenizer(documentation_text()[:20_000], verbose=False)["input_ids"]
    read = Windows.spread(ids, prompt=384, decoded=32, count=1)
    found = diagnose(model, calibration, read)
    first, *others = found.layers
    assert first.layer == 1 and len(others) == 28
    assert first.similarity < 0.1 < 0.5 < min(each.similarity for each in others)
    assert first.own_weights > 0.5 > 2 * first.unexplained
    assert all(each.unexplained < each.own_weights for each in found.layers)
    assert found.policies["infinigen"].kl.value < found.policies["infinigen-paper"].kl.value / 2
    assert found.verdict.level == "suitable"
