"""Copies of an attached model, and models that share its configuration: plain models, each."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import tiny
from calibrating import calibrate_tiny, covering, generate, reference, run, tokens
from infinigen_kv import CacheStateError, Calibration, Session, attach

PROMPT = 40
IDS = tokens(2, PROMPT + 4)


def saved_and_loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # noqa: TID251


def rebuilt(model: Any) -> Any:
    """Another model with the weights and a copy of the configuration."""
    made = type(model)(copy.deepcopy(model.config)).eval()
    made.load_state_dict(model.state_dict())
    return made


def sharing(model: Any) -> Any:
    """Another model with the weights and the same configuration object."""
    made = type(model)(model.config).eval()
    made.load_state_dict(model.state_dict())
    return made


def shallow(model: Any) -> Any:
    made = type(model)(copy.copy(model.config)).eval()
    made.load_state_dict(model.state_dict())
    return made


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "saved": saved_and_loaded,
    "rebuilt": rebuilt,
}
SHARING: dict[str, Callable[[Any], Any]] = {"sharing": sharing, "shallow": shallow}


@pytest.fixture(scope="module", params=["llama", "gemma2", "opt"])
def fitted(request: pytest.FixtureRequest) -> tuple[Any, Calibration, torch.Tensor]:
    """A model, its calibration, and its logits of `IDS` without this package."""
    model = tiny.TINY[request.param]()
    return model, calibrate_tiny(model), reference(model, IDS, prompt=PROMPT)


def works(session: Session, expected: torch.Tensor) -> bool:
    actual = run(session.model, session.new_cache(), IDS, prompt=PROMPT)
    assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    return True


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_is_a_plain_model(fitted: tuple[Any, Calibration, torch.Tensor], kind: str) -> None:
    model, calibration, expected = fitted
    before = model.config._attn_implementation
    with attach(model, calibration, covering()) as session:
        assert works(session, expected)
        made = COPIES[kind](model)
        assert made.config._attn_implementation == before
        assert torch.equal(reference(made, IDS, prompt=PROMPT), expected)
        with pytest.raises(CacheStateError, match="only works with the model"):
            generate(made, IDS, session.new_cache(), new=1)
        with attach(made, calibration, covering()) as other:
            assert works(other, expected) and works(session, expected)
        assert works(session, expected)
    assert torch.equal(reference(made, IDS, prompt=PROMPT), expected)
    with attach(made, calibration, covering()) as session:
        assert works(session, expected)
    assert made.config._attn_implementation == model.config._attn_implementation == before


def test_a_copied_part_is_plain_too(fitted: tuple[Any, Calibration, torch.Tensor]) -> None:
    model, calibration, _ = fitted
    with torch.no_grad():
        expected = model.get_decoder()(input_ids=IDS).last_hidden_state
    with attach(model, calibration, covering()):
        decoder = copy.deepcopy(model.get_decoder())
    with torch.no_grad():
        assert torch.equal(decoder(input_ids=IDS).last_hidden_state, expected)


@pytest.mark.parametrize("kind", [*COPIES, *SHARING])
@pytest.mark.parametrize("first_out", [0, 1])
def test_detached_in_any_order(
    fitted: tuple[Any, Calibration, torch.Tensor], kind: str, first_out: int
) -> None:
    model, calibration, expected = fitted
    before = model.config._attn_implementation
    with ExitStack() as one, ExitStack() as two:
        blocks = (one, two)
        first = one.enter_context(attach(model, calibration, covering()))
        made = {**COPIES, **SHARING}[kind](model)
        second = two.enter_context(attach(made, calibration, covering()))
        sessions = (first, second)
        assert works(first, expected) and works(second, expected)
        blocks[first_out].close()
        assert works(sessions[1 - first_out], expected)
        blocks[1 - first_out].close()
        assert [each.config._attn_implementation for each in (model, made)] == [before] * 2
        for each in (model, made):
            assert torch.equal(reference(each, IDS, prompt=PROMPT), expected)


@pytest.mark.parametrize("kind", SHARING)
def test_a_model_with_the_same_configuration_goes_on(
    fitted: tuple[Any, Calibration, torch.Tensor], kind: str
) -> None:
    model, calibration, expected = fitted
    made = SHARING[kind](model)
    with attach(model, calibration, covering()) as session:
        actual = reference(made, IDS, prompt=PROMPT)
        assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        assert works(session, expected)
    assert torch.equal(reference(made, IDS, prompt=PROMPT), expected)


def test_attention_that_was_changed_while_attached_is_named(
    fitted: tuple[Any, Calibration, torch.Tensor],
) -> None:
    model, calibration, expected = fitted
    before = model.config._attn_implementation
    with attach(model, calibration, covering()) as session:
        cache = session.new_cache()
        model.set_attn_implementation("eager")
        with pytest.raises(CacheStateError, match="the model's attention is 'eager' now"):
            run(model, cache, IDS, prompt=PROMPT)
        assert cache.get_seq_length() == 0
    assert model.config._attn_implementation == before
    assert torch.equal(reference(model, IDS, prompt=PROMPT), expected)


@pytest.mark.parametrize("take", [saved_and_loaded, copy.copy])
def test_what_belongs_to_a_session_stays_there(
    fitted: tuple[Any, Calibration, torch.Tensor], take: Callable[[Any], Any]
) -> None:
    """`copy.deepcopy` of a cache is another matter, see the cases of caches."""
    model, calibration, expected = fitted
    with (
        attach(model, calibration, covering()) as session,
        session.new_batch(tokens=64, rows=2) as batch,
    ):
        cache = session.new_cache()
        for _ in range(2):  # empty, and with text
            for each in (cache, session, batch):
                with pytest.raises(
                    CacheStateError, match=f"{type(each).__name__} cannot be pickled"
                ):
                    take(each)
            if cache.get_seq_length() == 0:
                actual = run(model, cache, IDS, prompt=PROMPT)
        assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        assert copy.deepcopy(cache).get_seq_length() == IDS.shape[1]
