"""A cache that `generate` is given is used, or refused before anything is read."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import tiny
from calibrating import calibrate_tiny, selecting, tokens
from infinigen_kv import CacheStateError, InputError, attach
from infinigen_kv.cache.forward import cache_argument

ORIGINAL = 64  # positions with short rotary factors


def long_phi3() -> PreTrainedModel:
    """Turns from short to long rotary factors, and drops the cache for that."""
    dims = 4  # half of the rotated half of a head
    return tiny.phi3(
        max_position_embeddings=512,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0] * dims,
            "long_factor": [4.0] * dims,
            "original_max_position_embeddings": ORIGINAL,
        },
    )


def generate(model: PreTrainedModel, ids: Tensor, cache: Any, **options: Any) -> Tensor:
    found: Tensor = model.generate(
        ids, **{cache_argument(model): cache, "do_sample": False, "max_new_tokens": 12, **options}
    )
    return found


@pytest.mark.parametrize("length", [ORIGINAL - 5, ORIGINAL, ORIGINAL + 1, 100])
def test_a_model_that_drops_the_cache_to_read_anew(length: int) -> None:
    """Short of its switch, at it, and beyond: ours holds the text, which equals Transformers'."""
    model, ids = long_phi3(), tokens(1, length)
    expected = generate(model, ids, DynamicCache(config=model.config))
    with attach(model) as session:
        cache = session.new_cache(policy="stream")
        assert torch.equal(generate(model, ids, cache), expected)
        assert cache.get_seq_length() == length + 11


def test_a_second_turn_across_the_switch() -> None:
    model, ids = long_phi3(), tokens(1, 100)
    with attach(model) as session:
        cache = session.new_cache(policy="stream")
        generate(model, ids[:, :40], cache, max_new_tokens=4)
        found = generate(model, ids, cache)
        assert cache.get_seq_length() == 111
    assert torch.equal(found, generate(model, ids, DynamicCache(config=model.config)))


def test_any_other_model_that_drops_the_cache_is_told() -> None:
    model, ids = tiny.llama(), tokens(1, 20)

    class Forgetful(type(model)):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
            return super().prepare_inputs_for_generation(*args, **{**kwargs, "cache": None})

    model.__class__ = Forgetful
    with attach(model) as session:
        cache = session.new_cache(policy="stream")
        with pytest.raises(CacheStateError, match="has dropped it"):
            generate(model, ids, cache)
        assert cache.get_seq_length() == 0


def test_a_forward_without_a_cache_stays_plain() -> None:
    model, ids = tiny.llama(), tokens(1, 20)
    with torch.no_grad():
        expected = model(ids).logits
        with attach(model) as session:
            cache = session.new_cache(policy="stream")
            generate(model, ids, cache)
            torch.testing.assert_close(model(ids).logits, expected)
            plain = model.generate(ids, do_sample=False, max_new_tokens=4)
        assert cache.get_seq_length() == 31
        assert torch.equal(plain, model.generate(ids, do_sample=False, max_new_tokens=4))


@pytest.mark.parametrize("where", ["generation", "both"])
def test_a_checkpoint_that_wants_no_cache(where: str) -> None:
    model, ids = tiny.llama(), tokens(1, 40)
    expected = generate(model, ids, DynamicCache(config=model.config))
    model.generation_config.use_cache = False
    model.config.use_cache = where != "both"
    with ExitStack() as stack:
        with pytest.warns(UserWarning, match="use_cache=False"):
            session = stack.enter_context(attach(model))
        cache = session.new_cache(policy="stream")
        assert torch.equal(generate(model, ids, cache), expected)
        assert cache.get_seq_length() == 51
    assert model.generation_config.use_cache is False


def test_no_cache_wanted_by_the_user_is_refused() -> None:
    model, ids = tiny.llama(), tokens(1, 40)
    with attach(model) as session:
        cache = session.new_cache(policy="stream")
        with pytest.raises(InputError, match="use_cache=False goes with no cache"):
            generate(model, ids, cache, use_cache=False)
        assert cache.get_seq_length() == 0
        generate(model, ids, cache)


@pytest.mark.parametrize("padding", [0, 5])
def test_a_prompt_that_the_cache_holds_already(padding: int) -> None:
    model, ids = tiny.llama(), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    with attach(model, calibrate_tiny(model), selecting()) as session:
        cache = session.new_cache()
        answer = generate(model, ids, cache, attention_mask=mask)
        held = cache.get_seq_length()
        for again in (ids, answer[:, :held]):
            longer = torch.cat([mask, mask.new_ones(2, again.shape[1] - 40)], dim=1)
            with pytest.raises(CacheStateError, match=f"the cache holds {held} tokens"):
                generate(model, again, cache, attention_mask=longer)
            assert cache.get_seq_length() == held
        # the answer's last token is not held yet, so there is something new
        longer = torch.cat([mask, mask.new_ones(2, answer.shape[1] - 40)], dim=1)
        more = generate(model, answer, cache, attention_mask=longer)
        assert more.shape[1] == answer.shape[1] + 12
        assert cache.get_seq_length() == answer.shape[1] + 11


def test_new_tokens_alone_go_with_a_mask_of_all() -> None:
    """As Transformers documents it."""
    model, ids = tiny.llama(), tokens(1, 50)
    expected = generate(model, ids, DynamicCache(config=model.config))[:, 50:]
    with attach(model) as session:
        cache = session.new_cache(policy="stream")
        generate(model, ids[:, :40], cache, max_new_tokens=1)
        found = generate(model, ids[:, 40:], cache, attention_mask=torch.ones(1, 50).long())
        assert torch.equal(found[:, 10:], expected)


def test_a_checkpoint_that_names_a_cache() -> None:
    model, ids = tiny.llama(), tokens(1, 40)
    expected = generate(model, ids, DynamicCache(config=model.config))
    model.generation_config.cache_implementation = "static"
    with ExitStack() as stack:
        with pytest.warns(UserWarning, match="cache_implementation='static'"):
            session = stack.enter_context(attach(model))
        cache = session.new_cache(policy="stream")
        assert torch.equal(generate(model, ids, cache), expected)
    assert model.generation_config.cache_implementation == "static"


def test_nothing_is_said_without_need() -> None:
    model = tiny.llama()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with attach(model):
            pass


def test_attention_weights_cannot_be_had() -> None:
    model, ids = tiny.llama(), tokens(1, 20)
    with attach(model) as session, torch.no_grad():
        cache = session.new_cache(policy="stream")
        with pytest.raises(InputError, match="output_attentions=True cannot be had"):
            model(ids, cache=cache, output_attentions=True)
        with pytest.raises(InputError, match="output_attentions=True cannot be had"):
            generate(model, ids, cache, output_attentions=True, return_dict_in_generate=True)
        assert cache.get_seq_length() == 0
        assert model(ids, cache=cache).logits.isfinite().all()
