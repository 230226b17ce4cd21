"""Backward passes with a session's caches: right where they can be, refused where they cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

import tiny
from calibrating import calibrate_tiny, reference, selecting, tokens
from infinigen_kv import CacheStateError, Calibration, StorageConfig, attach
from infinigen_kv.cache.forward import cache_argument
from infinigen_kv.policies.registry import POLICIES
from linking import apart

PROMPT = 40
IDS = tokens(1, PROMPT + 5)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def fitted(request: pytest.FixtureRequest) -> tuple[Any, Calibration]:
    model = tiny.TINY[request.param]()
    return model, calibrate_tiny(model)


def logits_of(model: Any, cache: Any, piece: slice) -> Tensor:
    """Of one forward that keeps its graph."""
    arguments = {cache_argument(model): cache, "use_cache": True}
    return model(input_ids=IDS[:, piece], **arguments).logits


def gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    """Of the sum of the squares, by parameter."""
    model.zero_grad()
    logits.square().sum().backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("home", ["local", "emulated", "capacity"])
def test_gradients_of_the_first_forward(
    fitted: tuple[Any, Calibration], policy: str, home: str, tmp_path: Path
) -> None:
    """However much is read and chosen before the backward pass."""
    model, calibration = fitted
    plain = logits_of(model, DynamicCache(config=model.config), slice(0, PROMPT))
    expected = gradients(model, plain)
    storage = StorageConfig() if home == "local" else apart("emulated", tmp_path)
    if home == "capacity":
        storage = apart("emulated", tmp_path, capacity=48)
    with attach(model, calibration, selecting(), storage) as session:
        cache = session.new_cache(policy=policy, tokens=64)
        logits = logits_of(model, cache, slice(0, PROMPT))
        for at in range(PROMPT, PROMPT + 5):
            logits_of(model, cache, slice(at, at + 1))
        actual = gradients(model, logits)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        assert_close(actual[name], gradient, atol=1e-4 * scale, rtol=1e-4, msg=name)


@pytest.mark.parametrize("policy", ["ideal", "infinigen"])
@pytest.mark.parametrize("home", ["local", "emulated"])
@pytest.mark.parametrize("piece", [slice(PROMPT, PROMPT + 1), slice(PROMPT, PROMPT + 5)])
def test_later_forwards_have_none(
    fitted: tuple[Any, Calibration], policy: str, home: str, piece: slice, tmp_path: Path
) -> None:
    """And the cache goes on as if nothing had been asked."""
    model, calibration = fitted
    expected = reference(model, IDS, prompt=PROMPT)
    storage = StorageConfig() if home == "local" else apart(home, tmp_path)
    with attach(model, calibration, selecting(min_context=1000), storage) as session:
        cache = session.new_cache(policy=policy)
        logits_of(model, cache, slice(0, PROMPT))
        logits = logits_of(model, cache, piece)
        assert_close(logits, expected[:, piece], atol=1e-4, rtol=1e-4)
        with pytest.raises(CacheStateError, match="read the whole text in one forward"):
            logits.sum().backward()
        assert cache.get_seq_length() == piece.stop
        for at in range(piece.stop, PROMPT + 5):
            logits = logits_of(model, cache, slice(at, at + 1))
            assert_close(logits[:, 0], expected[:, at], atol=1e-4, rtol=1e-4)


def test_values_alone_that_learn() -> None:
    """Adapters often train one projection only."""
    model = tiny.llama()
    model.requires_grad_(False)
    projection = model.get_decoder().layers[2].self_attn.v_proj
    projection.weight.requires_grad_(True)
    with attach(model) as session:
        cache = session.new_cache(policy="ideal")
        logits = logits_of(model, cache, slice(0, PROMPT))
        refused = logits_of(model, cache, slice(PROMPT, PROMPT + 1))
        with pytest.raises(CacheStateError, match="backward pass"):
            refused.sum().backward()
        actual = gradients(model, logits)
    plain = logits_of(model, DynamicCache(config=model.config), slice(0, PROMPT))
    expected = gradients(model, plain)
    assert actual.keys() == expected.keys() == {"model.layers.2.self_attn.v_proj.weight"}
    for name, gradient in expected.items():
        assert_close(actual[name], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))


def test_nothing_is_kept_for_a_backward_pass(fitted: tuple[Any, Calibration]) -> None:
    """Of text that is generated without `torch.no_grad`."""
    with attach(*fitted, selecting()) as session:
        cache = session.new_cache()
        for at in (slice(0, PROMPT), slice(PROMPT, PROMPT + 1)):
            logits_of(session.model, cache, at)
        for layer in cache.offloaded:
            assert not any(each.requires_grad for each in layer.pool.all())
