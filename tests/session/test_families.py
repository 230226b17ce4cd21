"""Every family: fetching everything equals Transformers' own cache; detaching leaves nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache

from calibrating import (
    calibrate_tiny,
    covering,
    generate,
    left_padded,
    reference,
    run,
    selecting,
    tokens,
)
from infinigen_kv import attach
from tiny import TINY

PROMPT, STEPS = 21, 8  # the smallest window of the tiny models is 16, the next 20 and 24
PADDING = (0, 4, 11)


@pytest.fixture(params=sorted(TINY))
def model(request: pytest.FixtureRequest) -> Any:
    return TINY[request.param]()


def hooks_of(model: Any) -> dict[str, list[Any]]:
    return {
        f"{name}.{kind}": list(getattr(module, kind).values())
        for name, module in model.named_modules()
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
    }


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return left_padded(tokens(len(PADDING), PROMPT + STEPS), PADDING)


def real(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits of the tokens that are not padding: what padding sees is nobody's business."""
    return logits[mask.bool()]


def test_full_policy_equals_dynamic_cache(model: Any) -> None:
    ids, mask = batch()
    expected = reference(model, ids, mask, prompt=PROMPT)
    with attach(model) as session:
        actual = run(model, session.new_cache(policy="ideal"), ids, mask, prompt=PROMPT)
    assert_close(real(actual, mask), real(expected, mask), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rehearsal", ["calibrated", "paper"])
def test_selecting_everything_equals_dynamic_cache(model: Any, rehearsal: str) -> None:
    ids, mask = batch()
    expected = reference(model, ids, mask, prompt=PROMPT)
    with attach(model, calibrate_tiny(model), covering(rehearsal=rehearsal)) as session:
        actual = run(model, session.new_cache(), ids, mask, prompt=PROMPT)
    assert_close(real(actual, mask), real(expected, mask), atol=1e-4, rtol=1e-4)


def test_generated_text_is_the_same(model: Any) -> None:
    ids, mask = batch()
    ids, mask = ids[:, :PROMPT], mask[:, :PROMPT]
    expected = generate(model, ids, attention_mask=mask, new=12)
    with attach(model, calibrate_tiny(model), covering()) as session:
        full, all_selected = (
            generate(model, ids, session.new_cache(policy=name), attention_mask=mask, new=12)
            for name in ("ideal", "infinigen")
        )
    assert full.tolist() == expected.tolist()
    assert all_selected.tolist() == expected.tolist()


def test_selection_leaves_the_model_as_it_was(model: Any) -> None:
    calibration = calibrate_tiny(model)
    ids, mask = batch()
    before = reference(model, ids, mask, prompt=PROMPT)
    hooks, attention, config = hooks_of(model), model.config._attn_implementation, str(model.config)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    with attach(model, calibration, selecting()) as session:
        run(model, session.new_cache(), ids, mask, prompt=PROMPT)
        generate(model, ids, session.new_cache(), attention_mask=mask, new=3)
    assert hooks_of(model) == hooks
    assert model.config._attn_implementation == attention
    assert str(model.config) == config
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    after = reference(model, ids, mask, prompt=PROMPT)
    assert torch.equal(real(after, mask), real(before, mask))


def test_other_caches_still_work_on_an_attached_model(model: Any) -> None:
    ids, mask = batch()
    expected = reference(model, ids, mask, prompt=PROMPT)
    with attach(model):
        actual = run(model, DynamicCache(config=model.config), ids, mask, prompt=PROMPT)
    assert_close(real(actual, mask), real(expected, mask), atol=1e-4, rtol=1e-4)
