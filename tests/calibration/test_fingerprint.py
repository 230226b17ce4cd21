"""What makes two models the same and what does not."""

from __future__ import annotations

import json

import pytest
import torch

from infinigen_kv.calibration.fingerprint import (
    check_fingerprint,
    digest,
    model_fingerprint,
    precision_of,
    text_hash,
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
