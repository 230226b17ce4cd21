"""What makes two models the same and what does not."""

from __future__ import annotations

import json

import pytest
import torch

from infinigen_kv.calibration.fingerprint import (
    digest,
    model_digest,
    model_fingerprint,
    text_hash,
    weights_hash,
)
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
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"query_weights_sha256", "weights_sha256"}


@pytest.mark.parametrize("family", TINY)
def test_every_weight_of_the_decoder_counts(family: str) -> None:
    """Each of them leads to the inputs that queries are predicted from."""
    adapter = adapter_for(TINY[family]())
    seen = {weights_hash(adapter.decoder.parameters())}
    for weight in adapter.decoder.parameters():
        with torch.no_grad():
            weight.add_(1.0)
        seen.add(model_fingerprint(adapter)["weights_sha256"])
    assert len(seen) == 1 + len(list(adapter.decoder.parameters()))


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


def test_the_output_head_does_not_count_but_where_the_whole_model_does() -> None:
    model = llama()
    before, whole = model_fingerprint(adapter_for(model)), model_digest(model)
    assert whole == model_digest(llama())
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert model_fingerprint(adapter_for(model)) == before
    assert model_digest(model) != whole


@pytest.mark.parametrize("shape", [(512, 1024), (1000, 777), (4096, 128), (8192, 2048)])
def test_changes_of_a_large_weight_are_seen(shape: tuple[int, int]) -> None:
    """A step of a merged adapter, a block of rows, a block of columns, a pruned hundredth."""
    weight = torch.ones(shape)
    rows, columns = shape
    changes = [weight.clone() for _ in range(4)]
    seeded = torch.Generator().manual_seed(0)
    changes[0] += torch.outer(torch.linspace(-1, 1, rows), torch.linspace(-1, 1, columns))
    changes[1][rows // 4 : rows // 2] = 0.0
    changes[2][:, columns // 2 : columns // 2 + 64] = 0.0
    changes[3].view(-1)[
        torch.randperm(weight.numel(), generator=seeded)[: weight.numel() // 100]
    ] = 0.0
    assert len({weights_hash([each]) for each in (weight, *changes)}) == 5


def test_a_single_number_of_a_large_weight_may_go_unseen() -> None:
    weight = torch.zeros(512, 1024)
    before = weights_hash([weight])
    weight[0, 1] = 1.0
    assert weights_hash([weight]) == before
    assert weights_hash([weight[:, :3]]) != weights_hash([torch.zeros(512, 3)])  # small: whole


def test_other_positions_count() -> None:
    """A context that is extended by scaled rotary positions has other queries."""
    settings = [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "default", "rope_theta": 500_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    ]
    models = [llama(rope_parameters=each) for each in settings]
    assert len({model_fingerprint(adapter_for(model))["positions"] for model in models}) == 3


def test_digest_is_stable_and_tells_values_apart() -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})
    assert digest({}) == "44136fa355b3678a"  # the start of SHA-256 of "{}"


def test_boundaries_of_texts_count() -> None:
    assert len({text_hash(each) for each in (["ab"], ["a", "b"], ["", "ab"], [], ["ba"])}) == 5
