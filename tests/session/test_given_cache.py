"""A cache that `generate` is given is used, or refused before anything is read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import tiny
from calibrating import calibrate_tiny, feed, selecting, tokens
from infinigen_kv import CacheStateError, InputError, attach
from infinigen_kv.cache.forward import cache_argument
from infinigen_kv.cache.recorder import FetchRecorder

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


def preparing(model: PreTrainedModel, replaced: Callable[[Tensor, Any], Any]) -> PreTrainedModel:
    """A model whose `prepare_inputs_for_generation` goes on with another cache, or with None."""

    class Preparing(type(model)):  # type: ignore[misc]
        def prepare_inputs_for_generation(
            self, input_ids: Tensor, cache: Any = None, **kwargs: Any
        ) -> Any:
            left = replaced(input_ids, cache)
            if left is None:
                kwargs["next_sequence_length"] = None
            return super().prepare_inputs_for_generation(input_ids, cache=left, **kwargs)

    model.__class__ = Preparing
    return model


def generate(model: Any, ids: Tensor, cache: Any, **options: Any) -> Tensor:
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


@pytest.mark.parametrize("length", [ORIGINAL - 7, ORIGINAL - 4, ORIGINAL - 1])
def test_the_switch_while_drafts_are_verified(length: int) -> None:
    """As Transformers does it: a draft may turn the switch before its text would."""
    model, ids = long_phi3(), tokens(1, length // 3).repeat(1, 3)
    options = {"prompt_lookup_num_tokens": 4}
    expected = generate(model, ids, DynamicCache(config=model.config), **options)
    with attach(model) as session:
        cache = session.new_cache(policy="stream")
        assert torch.equal(generate(model, ids, cache, **options), expected)
        assert cache.get_seq_length() == ids.shape[1] + 11


def test_drafts_select_after_the_switch() -> None:
    model, ids = long_phi3(), tokens(1, 20).repeat(1, 3)
    with attach(model, calibrate_tiny(model), selecting()) as session:
        cache = session.new_cache()
        generate(model, ids, cache, prompt_lookup_num_tokens=4, max_new_tokens=6)
        assert cache.get_seq_length() > ORIGINAL
        cache.recorder = FetchRecorder()
        feed(model, cache, tokens(1, 3), None, slice(0, 3))
        assert 0 < cache.recorder.fetched_share(first_layer=1) < 0.5


def test_a_turn_in_pieces_across_the_switch_is_told() -> None:
    """Its first piece would be read without the tokens before it."""
    model, ids = long_phi3(), tokens(1, 200)
    with attach(model) as session:
        cache = session.new_cache(policy="stream")
        generate(model, ids[:, :40], cache, max_new_tokens=4)
        with pytest.raises(CacheStateError, match=r"cache of 43 tokens.* next 80 tokens"):
            generate(model, ids, cache, prefill_chunk_size=80)
        assert cache.get_seq_length() == 43


DROPPING: Mapping[str, Callable[[Tensor, Any], Any]] = {
    "dropped": lambda ids, cache: None,
    "replaced": lambda ids, cache: cache if type(cache) is DynamicCache else DynamicCache(),
}


@pytest.mark.parametrize("kind", DROPPING)
def test_any_other_model_that_does_not_keep_the_cache_is_told(kind: str) -> None:
    model, ids = preparing(tiny.llama(), DROPPING[kind]), tokens(1, 20)
    with attach(model) as session:
        cache = session.new_cache(policy="stream")
        with pytest.raises(CacheStateError, match=r"cache of 0 tokens.* next 20 tokens"):
            generate(model, ids, cache)
        assert cache.get_seq_length() == 0


def test_a_model_that_drops_the_cache_midway_is_told() -> None:
    model, ids = tiny.llama(), tokens(1, 20)
    preparing(model, lambda ids, cache: cache if ids.shape[1] != 24 else None)
    with attach(model) as session:
        cache = session.new_cache(policy="stream")
        with pytest.raises(CacheStateError, match=r"cache of 23 tokens.* next 24 tokens"):
            generate(model, ids, cache)
        assert cache.get_seq_length() == 23


def test_a_plain_forward_leaves_a_given_cache_alone() -> None:
    """Even one that looks like the text read anew: as long as what is held and a token more."""
    model, ids = long_phi3(), tokens(1, ORIGINAL + 1, seed=3)
    with torch.no_grad():
        expected = model(ids, use_cache=True).logits
        with attach(model) as session:
            cache = session.new_cache(policy="stream")
            generate(model, tokens(1, ORIGINAL - 4), cache, max_new_tokens=5)
            torch.testing.assert_close(model(ids, use_cache=True).logits, expected)
            assert cache.get_seq_length() == ORIGINAL


def test_a_plain_forward_after_a_generate_that_failed() -> None:
    model, ids = tiny.llama(), tokens(1, 20)
    with torch.no_grad(), attach(model) as session:
        cache = session.new_cache(policy="stream")
        with pytest.raises(ValueError, match="tokenizer"):
            generate(model, ids, cache, stop_strings=["x"])  # told after it has taken the cache
        model(ids, use_cache=True)
        model.generate(ids, do_sample=False, max_new_tokens=2)
        generate(model, ids, cache)
        assert cache.get_seq_length() == 31


def test_the_model_and_its_copies_are_as_before() -> None:
    model = tiny.llama()
    with attach(model):
        copied = deepcopy(model)
        assert copied.prepare_inputs_for_generation.__self__ is copied
    assert "prepare_inputs_for_generation" not in vars(model)


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


@pytest.mark.parametrize("family", tiny.TINY)
@pytest.mark.parametrize(
    "options", [{}, {"prefill_chunk_size": 16}, {"prompt_lookup_num_tokens": 3}]
)
def test_the_same_call_twice(family: str, options: Any) -> None:
    model, ids = tiny.TINY[family](), tokens(1, 12)
    with attach(model) as session:
        cache = session.new_cache(policy="stream")
        generate(model, ids, cache, max_new_tokens=4, **options)
        with pytest.raises(CacheStateError, match="the cache holds 15 tokens"):
            generate(model, ids, cache, max_new_tokens=4, **options)
        assert cache.get_seq_length() == 15


@pytest.mark.parametrize("length", [3, 15])  # the cache holds as many or more
@pytest.mark.parametrize("given", ["ids", "embeddings"])
def test_new_tokens_alone_without_a_mask_of_all(length: int, given: str) -> None:
    """`generate` takes them for the whole text."""
    model, new = tiny.llama(), tokens(1, length, seed=1)
    inputs = {"ids": new, "embeddings": model.get_input_embeddings()(new)}[given]
    name = {"ids": "inputs", "embeddings": "inputs_embeds"}[given]
    with attach(model) as session:
        cache = session.new_cache(policy="stream")
        generate(model, tokens(1, 12), cache, max_new_tokens=4)
        with pytest.raises(CacheStateError, match="the cache holds 15 tokens"):
            model.generate(**{name: inputs}, cache=cache, max_new_tokens=4)
        assert cache.get_seq_length() == 15


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
        with pytest.raises(InputError, match="output_attentions=True is not valid"):
            model(ids, cache=cache, output_attentions=True)
        with pytest.raises(InputError, match="output_attentions=True is not valid"):
            generate(model, ids, cache, output_attentions=True, return_dict_in_generate=True)
        assert cache.get_seq_length() == 0
        assert model(ids, cache=cache).logits.isfinite().all()
