"""What makes two models the same and what does not."""

from __future__ import annotations

import json

import pytest
import torch

from infinigen_kv.calibration.fingerprint import (
    check_fingerprint,
    digest,
    model_digest,
    model_fingerprint,
    precision_of,
    text_hash,
    weights_hash,
)
from infinigen_kv.errors import CalibrationError
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.models.adapters.base import Adapter
from tiny import TINY, llama, mistral, qwen2

HALF, BRIEF = torch.float16, torch.bfloat16


@pytest.mark.parametrize("family", TINY)
def test_one_checkpoint_has_one_fingerprint_in_every_dtype(family: str) -> None:
    half = TINY[family]().bfloat16()
    single = TINY[family]()
    assert model_fingerprint(adapter_for(half)) == model_fingerprint(adapter_for(single))


def converted(family: str, *types: torch.dtype) -> Adapter:
    """The checkpoint in float32, converted to these types one after the other."""
    model = TINY[family]()
    for each in types:
        model.to(each)
    return adapter_for(model)


def check(made: Adapter, used: Adapter) -> None:
    """A calibration of one is used with the other."""
    record = json.loads(json.dumps([model_fingerprint(made), precision_of(made)]))
    check_fingerprint(used, *record)


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize(
    ("made", "used"),
    [
        ((), (HALF,)),
        ((HALF,), ()),
        ((BRIEF,), (BRIEF, HALF)),
        ((HALF,), (HALF, BRIEF)),
        ((HALF,), (HALF, torch.float32)),
        ((HALF, torch.float32), (HALF,)),
    ],
)
def test_a_calibration_in_one_type_goes_with_another(
    family: str, made: tuple[torch.dtype, ...], used: tuple[torch.dtype, ...]
) -> None:
    check(converted(family, *made), converted(family, *used))


def test_a_type_that_rounds_differently_is_named() -> None:
    """Of a checkpoint in float32 neither of the two 16-bit types can tell the other."""
    for made, used in ((BRIEF, HALF), (HALF, BRIEF)):
        names = [str(each).removeprefix("torch.") for each in (made, used)]
        message = "it was made in {}, and the model is in {},.*calibrate it in {}".format(
            *names, names[1]
        )
        with pytest.raises(CalibrationError, match=message):
            check(converted("llama", made), converted("llama", used))


@pytest.mark.parametrize("used", [(), (HALF,), (BRIEF,)])
@pytest.mark.parametrize("made", [(), (HALF,), (BRIEF,)])
def test_other_weights_are_others_in_every_type(
    made: tuple[torch.dtype, ...], used: tuple[torch.dtype, ...]
) -> None:
    other = converted("llama", *used)
    with torch.no_grad():
        other.query_weight(2)[0][3, 5] += 0.5
    with pytest.raises(CalibrationError, match="belongs to another model") as refused:
        check(converted("llama", *made), other)
    assert ("in another type" in str(refused.value)) == (made != used)


def test_a_record_from_before_types_were_recorded() -> None:
    fingerprint = model_fingerprint(converted("llama"))
    for types in ((), (BRIEF,)):
        check_fingerprint(converted("llama", *types), fingerprint, {})
    with pytest.raises(CalibrationError, match="made in another type, and the model is in float16"):
        check_fingerprint(converted("llama", HALF), fingerprint, {})


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
