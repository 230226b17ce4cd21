"""Models that `torch.compile` has compiled, whole or in parts: same text, same selection."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import tiny
from calibrating import (
    calibrate_tiny,
    covering,
    feed,
    generate,
    left_padded,
    reference,
    selecting,
    tokens,
)
from infinigen_kv import Calibration, Session, attach
from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.kernels.finding import KernelsName

PROMPT = 40
NEW = 8


def _forward(model: Any, **options: Any) -> None:
    model.forward = torch.compile(model.forward, **options)


def _layers(model: Any, **options: Any) -> None:
    for layer in model.get_decoder().layers:
        layer.compile(**options)


PARTS: dict[str, Callable[..., None]] = {
    "model": nn.Module.compile,
    "forward": _forward,
    "decoder": lambda model, **options: model.get_decoder().compile(**options),
    "layers": _layers,
}


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> KernelsName:
    if request.param == "native" and find_spec("numba") is None:
        pytest.skip("numba is not installed")
    return request.param


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """What a test compiles is not the next one's."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate_tiny(tiny.llama())


def text_and_choice(session: Session, ids: Tensor) -> tuple[list[Any], list[Any]]:
    """Generated tokens, and what every step selected."""
    cache = session.new_cache()
    cache.recorder = FetchRecorder(keep_indices=True)
    text = generate(session.model, ids, cache, new=NEW).tolist()
    assert cache.get_seq_length() == ids.shape[1] + NEW - 1
    return text, [sorted(each.index.flatten().tolist()) for _, each in cache.recorder.selections]


@pytest.mark.parametrize("part", PARTS)
def test_compiled_before_attach(calibration: Calibration, kernels: KernelsName, part: str) -> None:
    """The compiled model has run before, is attached twice, and is a plain one in between."""
    ids = tokens(1, PROMPT)
    plain = tiny.llama()
    expected = generate(plain, ids, new=NEW).tolist()
    with attach(plain, calibration, selecting(), kernels=kernels) as session:
        selected = text_and_choice(session, ids)
    model = tiny.llama()
    PARTS[part](model, backend="eager")
    for _ in range(2):
        assert generate(model, ids, new=NEW).tolist() == expected
        with attach(model, calibration, selecting(), kernels=kernels) as session:
            assert text_and_choice(session, ids) == selected
    assert generate(model, ids, new=NEW).tolist() == expected


def test_compiled_while_attached(calibration: Calibration, kernels: KernelsName) -> None:
    ids = tokens(1, PROMPT)
    model = tiny.llama()
    with attach(model, calibration, selecting(), kernels=kernels) as session:
        selected = text_and_choice(session, ids)
        model.compile(backend="eager")
        assert text_and_choice(session, ids) == selected
    assert generate(model, ids, new=NEW).equal(generate(tiny.llama(), ids, new=NEW))


@pytest.mark.parametrize("family", ["opt", "mistral_sliding", "gemma3", "gpt_neox"])
def test_families_compiled(family: str) -> None:
    """In a padded batch, against Transformers' own cache and no compiler."""
    model = tiny.TINY[family]()
    ids, mask = left_padded(tokens(2, PROMPT), (0, 7))
    expected = generate(model, ids, attention_mask=mask, new=NEW).tolist()
    calibration = calibrate_tiny(model)
    model.compile(backend="eager")
    with attach(model, calibration, covering()) as session:
        text = generate(model, ids, session.new_cache(), attention_mask=mask, new=NEW)
    assert text.tolist() == expected


@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler"
)
def test_inductor(calibration: Calibration, kernels: KernelsName) -> None:
    ids = tokens(1, PROMPT)
    model = tiny.llama(num_hidden_layers=2)
    expected = generate(model, ids, new=NEW).tolist()
    fitted = calibrate_tiny(model)
    model.compile()
    with attach(model, fitted, covering(), kernels=kernels) as session:
        assert generate(model, ids, session.new_cache(), new=NEW).tolist() == expected


@pytest.mark.parametrize("part", ["model", "decoder", "layers"])
def test_calibration_of_a_compiled_model(calibration: Calibration, part: str) -> None:
    """That has read windows of the same length before, so that its code is there already."""
    model = tiny.llama()
    PARTS[part](model, backend="eager")
    with torch.no_grad():
        model.get_decoder()(input_ids=tokens(1, 50), use_cache=False)
    fitted = calibrate_tiny(model)
    assert fitted.layers.keys() == calibration.layers.keys() == {1, 2, 3}
    for index, layer in fitted.layers.items():
        for name in ("down", "up", "skew"):
            expected = getattr(calibration.layers[index], name)
            assert_close(getattr(layer, name), expected, atol=1e-4, rtol=1e-4)


def test_batch_of_a_compiled_model(calibration: Calibration) -> None:
    model = tiny.llama()
    ids = tokens(1, PROMPT + NEW)
    expected = reference(model, ids, prompt=PROMPT)[0]
    model.compile(backend="eager")
    with (
        attach(model, calibration, covering()) as session,
        session.new_batch(tokens=64, rows=2) as batch,
    ):
        row, other = batch.join(ids[:, :PROMPT]), batch.join(ids[:, :20])
        for at in range(PROMPT, PROMPT + NEW):
            logits = batch.step({row: int(ids[0, at]), other: 5})
            assert_close(logits[0], expected[at], atol=1e-4, rtol=1e-4)


def test_failed_forward_of_a_compiled_model_is_taken_back(calibration: Calibration) -> None:
    ids = tokens(1, PROMPT + 3)
    model = tiny.llama()
    expected = reference(model, ids, prompt=PROMPT)
    layers = model.get_decoder().layers
    calls = itertools.count()

    @torch.compiler.disable
    def fail(*seen: Any) -> None:
        if next(calls) == len(layers) + 2:  # in the third layer of the second forward
            raise RuntimeError("on purpose")

    piece = partial(feed, model, ids=ids, mask=None)
    model.compile(backend="eager")
    with attach(model, calibration, covering()) as session:
        cache = session.new_cache()
        handles = [layer.mlp.register_forward_pre_hook(fail) for layer in layers]
        piece(cache=cache, piece=slice(0, PROMPT))
        with pytest.raises(RuntimeError, match="on purpose"):
            piece(cache=cache, piece=slice(PROMPT, PROMPT + 1))
        for handle in handles:
            handle.remove()
        assert cache.get_seq_length() == PROMPT
        for at in range(PROMPT, PROMPT + 3):
            logits = piece(cache=cache, piece=slice(at, at + 1))
            assert_close(logits[:, 0], expected[:, at], atol=1e-4, rtol=1e-4)
