"""What makes two models the same and what does not."""

from __future__ import annotations

import json

import pytest
import torch

from infinigen_kv.calibration.fingerprint import digest, model_fingerprint, text_hash
from infinigen_kv.models.adapters import adapter_for
from tiny import TINY, llama, mistral, qwen2


@pytest.mark.parametrize("family", TINY)
def test_one_checkpoint_has_one_fingerprint_in_every_dtype(family: str) -> None:
    half = TINY[family]().bfloat16()
    single = TINY[family]()
    assert model_fingerprint(adapter_for(half)) == model_fingerprint(adapter_for(single))


def test_it_survives_json() -> None:
    fingerprint = model_fingerprint(adapter_for(qwen2()))
    assert json.loads(json.dumps(fingerprint)) == fingerprint


@pytest.mark.parametrize("family", TINY)
def test_every_query_weight_counts(family: str) -> None:
    model = TINY[family]()
    adapter = adapter_for(model)
    before = model_fingerprint(adapter)
    (projection,) = (
        module
        for name, module in adapter.layers[3].module.named_modules()
        if name in ("q_proj", "qkv_proj", "query_key_value")
    )
    with torch.no_grad():
        projection.weight[0, 0] += 1.0
    after = model_fingerprint(adapter)
    assert {name for name in before if before[name] != after[name]} == {"query_weights_sha256"}


def test_biases_count() -> None:
    model = qwen2()
    before = model_fingerprint(adapter_for(model))
    bias = adapter_for(model).query_weight(1)[1]
    assert bias is not None
    with torch.no_grad():
        bias[0] += 1.0
    assert model_fingerprint(adapter_for(model)) != before


def test_families_and_shapes_count() -> None:
    seen = [
        model_fingerprint(adapter_for(model))
        for model in (llama(), mistral(), llama(num_hidden_layers=3), llama(num_key_value_heads=1))
    ]
    assert all(one != other for i, one in enumerate(seen) for other in seen[:i])
    # equal weights, another window
    assert model_fingerprint(adapter_for(mistral(sliding_window=24))) != seen[1]


def test_other_weights_do_not_count() -> None:
    model = llama()
    before = model_fingerprint(adapter_for(model))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert model_fingerprint(adapter_for(model)) == before


def test_digest_is_stable_and_tells_values_apart() -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})
    assert digest({}) == "44136fa355b3678a"  # the start of SHA-256 of "{}"


def test_boundaries_of_texts_count() -> None:
    assert len({text_hash(each) for each in (["ab"], ["a", "b"], ["", "ab"], [], ["ba"])}) == 5
