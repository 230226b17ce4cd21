"""Reported faults of prefill and generation: chunks, windows, drafts, short and long prompts."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

import tiny
from calibrating import (
    calibrate_tiny,
    covering,
    feed,
    generate,
    left_padded,
    reference,
    run,
    selecting,
    tokens,
)
from infinigen_kv import InfiniGenConfig, InputError, LanguageModel, attach
from infinigen_kv.cache.forward import decode, prefill
from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.models.loading import LoadedModel

EXACT: dict[str, dict[str, Any]] = {"full": {"policy": "ideal"}, "covering": {}}
PROMPT = 40
SLIDING = {
    "mistral_sliding": (tiny.TINY["mistral_sliding"], 24),
    "gemma2": (tiny.gemma2, 20),
    "gemma3": (tiny.gemma3, 16),
    "qwen2": (
        lambda: tiny.qwen2(use_sliding_window=True, sliding_window=20, max_window_layers=2),
        20,
    ),
    "qwen3": (
        lambda: tiny.qwen3(use_sliding_window=True, sliding_window=20, max_window_layers=1),
        20,
    ),
}


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


@pytest.fixture(params=["calibrated", "paper"])
def config(request: pytest.FixtureRequest) -> InfiniGenConfig:
    return selecting(rehearsal=request.param)


# Case L: prefill in chunks.


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2"])
@pytest.mark.parametrize("policy", EXACT)
@pytest.mark.parametrize("chunk", [1, 3, 39, 40, 1000])  # 39 leaves a last chunk of one token
def test_chunked_prefill_equals_one_shot(family: str, policy: str, chunk: int) -> None:
    model = tiny.TINY[family]()
    ids, mask = left_padded(tokens(2, PROMPT), (0, 7))
    expected = generate(model, ids, attention_mask=mask, new=8)
    with attach(model, calibrate_tiny(model), covering()) as session:
        cache = session.new_cache(**EXACT[policy])
        actual = generate(model, ids, cache, attention_mask=mask, prefill_chunk_size=chunk, new=8)
    assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2"])
@pytest.mark.parametrize("chunk", [1, 3, 39, 1000])
def test_chunked_prefill_selects_as_one_shot(
    family: str, chunk: int, config: InfiniGenConfig
) -> None:
    model = tiny.TINY[family]()
    ids, mask = left_padded(tokens(2, PROMPT), (0, 7))
    with attach(model, calibrate_tiny(model), config) as session:
        results = []
        for options in ({}, {"prefill_chunk_size": chunk}):
            cache = session.new_cache()
            cache.expect_prompt(PROMPT)
            cache.recorder = FetchRecorder(keep_indices=True)
            text = generate(model, ids, cache, attention_mask=mask, new=8, **options)
            chosen = [
                sorted(each.index.flatten().tolist()) for _, each in cache.recorder.selections
            ]
            results.append((text.tolist(), cache.recorder.fetched_share(), chosen))
    assert results[0] == results[1]
    assert results[0][1] < 1


@pytest.mark.parametrize("chunk", [1, 3, 39, 1000])
def test_prefill_helper_in_chunks(
    llama: tuple[Any, Any], config: InfiniGenConfig, chunk: int
) -> None:
    model, _ = llama
    ids = tokens(2, PROMPT + 4)
    with attach(*llama, config) as session:
        logits = []
        for size in (None, chunk):
            cache = session.new_cache()
            parts = [prefill(session, cache, ids[:, :PROMPT], chunk=size)]
            parts += [feed(model, cache, ids, None, slice(at, at + 1)) for at in range(40, 44)]
            logits.append(torch.cat(parts, 1))
    assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [0, -3])
def test_prefill_helper_names_a_bad_chunk(llama: tuple[Any, Any], chunk: int) -> None:
    with attach(*llama) as session, pytest.raises(InputError, match=f"chunk={chunk}"):
        prefill(session, session.new_cache(), tokens(1, 4), chunk=chunk)


# Cases M and J: the sliding window.


@pytest.mark.parametrize("family", SLIDING)
@pytest.mark.parametrize("policy", EXACT)
@pytest.mark.parametrize("offset", [-2, -1, 0, 1])  # prompt length less the window
def test_context_crosses_the_window(family: str, policy: str, offset: int) -> None:
    make, window = SLIDING[family]
    model = make()
    prompt = window + offset
    ids, mask = left_padded(tokens(3, prompt + 4), (0, 1, 5))
    expected = reference(model, ids, mask, prompt=prompt)
    with attach(model, calibrate_tiny(model), covering()) as session:
        actual = run(model, session.new_cache(**EXACT[policy]), ids, mask, prompt=prompt)
    assert_close(actual[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", SLIDING)
def test_cache_of_a_sliding_model_is_used_again(family: str) -> None:
    make, window = SLIDING[family]
    model = make()
    caches: list[Any] = [DynamicCache(config=model.config)]
    with attach(model, calibrate_tiny(model), covering()) as session:
        caches.append(session.new_cache())
        logits = []
        for cache in caches:
            ids = tokens(2, 3 * window)
            pieces = (window - 1, window, window + 1, 2 * window, 2 * window + 1, 3 * window)
            starts = (0, *pieces)
            logits.append(
                torch.cat(
                    [
                        feed(model, cache, ids, None, slice(start, stop))
                        for start, stop in zip(starts, pieces, strict=False)
                    ],
                    1,
                )
            )
    assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


def test_sliding_layers_are_not_offloaded() -> None:
    model = tiny.gemma2()
    with attach(model, calibrate_tiny(model), covering()) as session:
        cache = session.new_cache()
        cache.recorder = FetchRecorder()
        generate(model, tokens(1, PROMPT), cache, new=4)
    assert [layer.spec.index for layer in cache.offloaded] == [1, 3]
    assert sorted(cache.recorder.fetched_by_layer) == [1, 3]
    assert [cache.layers[index].keys.shape[2] for index in (0, 2)] == [19, 19]


# Case N: assisted decoding.


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2", "gemma3"])
@pytest.mark.parametrize("policy", EXACT)
@pytest.mark.parametrize("kind", ["assistant", "itself", "lookup"])
def test_assisted_decoding_equals_plain_greedy(family: str, policy: str, kind: str) -> None:
    model = tiny.TINY[family]()
    ids = tokens(1, 12).repeat(1, 3)  # something to look up, and longer than every window
    options: dict[str, Any] = {
        "assistant": lambda: {"assistant_model": _near_copy(family)},
        "itself": lambda: {"assistant_model": model},  # every draft is accepted
        "lookup": lambda: {"prompt_lookup_num_tokens": 4},
    }[kind]()
    expected = generate(model, ids, new=16)
    with attach(model, calibrate_tiny(model), covering()) as session:
        cache = session.new_cache(**EXACT[policy])
        actual = generate(model, ids, cache, new=16, **options)
    assert actual.tolist() == expected.tolist()
    assert cache.get_seq_length() == ids.shape[1] + 15


@pytest.mark.parametrize("kind", ["assistant", "itself", "lookup"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"refit_every": 5},
        {"min_context": 43},
        {"rehearsal": "paper"},
        {
            "refit_every": 5,
            "index_bits": "3x4+2x4",
            "partial_ratio": None,
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "opt"])
def test_drafts_see_what_they_would_see_one_by_one(
    family: str, settings: dict[str, Any], kind: str
) -> None:
    """Where something is selected: the first drafts, which come with the prompt, drafts across a
    refit, and drafts across the shortest context that selects.
    """
    model = tiny.TINY[family]()
    ids = tokens(1, 12, seed=3).repeat(1, 3)
    options: dict[str, Any] = {
        "assistant": lambda: {"assistant_model": _near_copy(family)},
        "itself": lambda: {"assistant_model": tiny.TINY[family]()},
        "lookup": lambda: {"prompt_lookup_num_tokens": 6},
    }[kind]()
    with attach(model, calibrate_tiny(model), selecting(**settings)) as session:
        plain, assisted = session.new_cache(), session.new_cache()
        scored = {"output_logits": True, "return_dict_in_generate": True}
        expected = generate(model, ids, plain, new=24, **scored)
        actual = generate(model, ids, assisted, new=24, **options, **scored)
    assert actual.sequences.tolist() == expected.sequences.tolist()
    assert_close(torch.stack(actual.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)
    assert assisted.get_seq_length() == plain.get_seq_length()


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_piece_of_drafts_that_fails_takes_the_others_back(
    llama: tuple[Any, Any], failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = llama
    ids, drafts = tokens(1, 40), tokens(1, 8, seed=1)
    with attach(*llama, selecting(refit_every=3)) as session:
        cache = session.new_cache()
        prefill(session, cache, ids)
        expected = decode(model, drafts, copy.deepcopy(cache))
        calls = iter(range(1, 9))
        norm = model.model.norm.forward

        def fails(hidden: Tensor) -> Tensor:
            if next(calls) == failing:
                raise RuntimeError("lost")
            return cast(Tensor, norm(hidden))

        with monkeypatch.context() as patch:
            patch.setattr(model.model.norm, "forward", fails)
            with pytest.raises(RuntimeError, match="lost"):
                decode(model, drafts, cache)
        assert cache.get_seq_length() == 40
        assert_close(decode(model, drafts, cache), expected, atol=1e-4, rtol=1e-4)


def _near_copy(family: str) -> Any:
    """A model that agrees with the original on some drafts and not on others."""
    model = tiny.TINY[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.95)
    return model


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_turn_after_assisted_decoding(family: str) -> None:
    model = tiny.TINY[family]()
    texts = []
    with attach(model, calibrate_tiny(model), covering()) as session:
        for cache in (DynamicCache(config=model.config), session.new_cache()):
            ids = tokens(1, 12).repeat(1, 3)
            ids = torch.cat(
                [ids, generate(model, ids, cache, new=8, prompt_lookup_num_tokens=3)], dim=1
            )
            ids = torch.cat([ids, tokens(1, 7, seed=1)], dim=1)
            texts.append(generate(model, ids, cache, new=8).tolist())
    assert texts[0] == texts[1]


def test_drafts_are_verified_with_selection(llama: tuple[Any, Any]) -> None:
    model, _ = llama
    with attach(*llama, selecting()) as session:
        cache = session.new_cache()
        cache.recorder = FetchRecorder()
        generate(model, tokens(1, 12).repeat(1, 4), cache, new=16, prompt_lookup_num_tokens=4)
    assert cache.recorder.fetched_share(first_layer=1) < 0.4


# Case Q: logits of the last position.


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 16}])
def test_generate_keeps_only_the_last_logits(llama: tuple[Any, Any], options: Any) -> None:
    model, _ = llama
    shapes = []
    handle = model.lm_head.register_forward_hook(lambda *seen: shapes.append(seen[2].shape[1]))
    with attach(*llama, selecting()) as session:
        generate(model, tokens(1, PROMPT), session.new_cache(), new=3, **options)
        assert prefill(session, session.new_cache(), tokens(2, PROMPT)).shape[:2] == (2, 1)
    handle.remove()
    assert set(shapes) == {1}


# Case R: short prompts.


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2"])
@pytest.mark.parametrize("prompt", [[5], [1], [0, 0, 0], [1, 0, 1, 0]])
def test_prompts_of_one_token_and_of_special_tokens(family: str, prompt: list[int]) -> None:
    model = tiny.TINY[family]()
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    expected = generate(model, ids, attention_mask=mask, new=8)
    with attach(model, calibrate_tiny(model), covering()) as session:
        for policy in EXACT.values():
            cache = session.new_cache(**policy)
            cache.expect_prompt(len(prompt))
            actual = generate(model, ids, cache, attention_mask=mask, new=8)
            assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2"])
def test_selection_right_after_a_prompt_of_one_token(family: str, config: InfiniGenConfig) -> None:
    """The statistics of one token are of rank 1 or 0: scores must stay finite all the same."""
    model = tiny.TINY[family]()
    settings = selecting(rehearsal=config.rehearsal, min_context=1)
    with attach(model, calibrate_tiny(model), settings) as session:
        cache = session.new_cache()
        cache.expect_prompt(1)
        cache.recorder = FetchRecorder(keep_indices=True)
        run(model, cache, tokens(1, 30), prompt=1)
    policies: list[Any] = [layer.policy for layer in cache.offloaded if layer.spec.index > 0]
    for policy in policies:
        assert policy._partial_keys.projection.query.isfinite().all()
        assert policy._partial_keys.view().isfinite().all()
    for number, (_, selection) in enumerate(cache.recorder.selections):
        cached = 1 + number // len(policies)
        kept = {0, *range(max(0, cached - 2), cached)}
        assert all(kept <= set(head.tolist()) for head in selection.index[0, :, 0])


@pytest.mark.parametrize("empty", ["ids", "embeddings"])
def test_empty_prompt(llama: tuple[Any, Any], empty: str) -> None:
    model, _ = llama
    given = {
        "ids": {"input_ids": torch.zeros(1, 0, dtype=torch.long)},
        "embeddings": {"inputs_embeds": torch.zeros(1, 0, 32)},
    }[empty]
    with attach(*llama, selecting()) as session:
        cache = session.new_cache()
        with pytest.raises(InputError, match="prompt is empty"):
            model(**given, cache=cache)
        with pytest.raises(InputError, match="prompt is empty"):
            prefill(session, cache, torch.zeros(1, 0, dtype=torch.long))
        feed(model, cache, tokens(1, 9), None, slice(0, 9))
    assert cache.get_seq_length() == 9


# Case S: more than the model's positions.


class WordTokenizer:
    """Words are token ids."""

    chat_template = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: list[int], **options: Any) -> str:
        return " ".join(str(each) for each in ids)


@pytest.fixture
def facade(llama: tuple[Any, Any]) -> LanguageModel:
    model, calibration = llama
    return LanguageModel(
        LoadedModel(model, cast(Any, WordTokenizer()), "tiny"), calibration, selecting()
    )


def test_facade_generates_what_the_model_does(facade: LanguageModel) -> None:
    prompt = " ".join(str(each) for each in tokens(1, PROMPT)[0].tolist())
    made = facade.generate(prompt, max_new_tokens=6, full=True)
    expected = generate(facade.model, tokens(1, PROMPT), new=6)
    assert list(made.token_ids) == expected[0].tolist()
    assert str(made) == " ".join(str(each) for each in made.token_ids)
    assert 0 < facade.generate(prompt, max_new_tokens=6).fetched_share < 0.5


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_implementation"])
def test_facade_refuses_another_cache(facade: LanguageModel, name: str) -> None:
    another = "static" if name == "cache_implementation" else DynamicCache()
    given: dict[str, Any] = {name: another}
    with pytest.raises(InputError, match=f"{name} is not valid"):
        facade.generate("5 6 7", max_new_tokens=2, **given)


@pytest.mark.parametrize(("prompt", "new"), [(500, 13), (513, 1), (1, 512)])
def test_prompt_and_new_tokens_beyond_the_positions(
    facade: LanguageModel, prompt: int, new: int
) -> None:
    calls = []
    handle = facade.model.model.register_forward_pre_hook(lambda *seen: calls.append(seen))
    with pytest.raises(InputError, match=f"{prompt + new} tokens .* 512 positions"):
        facade.generate("5 " * prompt, max_new_tokens=new)
    handle.remove()
    assert not calls


def test_prompt_that_just_fits(facade: LanguageModel) -> None:
    assert len(facade.generate("5 " * 508, max_new_tokens=4).token_ids) == 4


def test_too_long_prompt_without_the_facade(llama: tuple[Any, Any]) -> None:
    with attach(*llama, selecting()) as session:
        cache = session.new_cache()
        with pytest.raises(InputError, match="513 tokens"):
            generate(llama[0], tokens(1, 513), cache, new=1)
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("new", [0, -1, 2.5, "3", True, None])
def test_facade_names_a_bad_number_of_new_tokens(facade: LanguageModel, new: Any) -> None:
    with pytest.raises(InputError, match=f"max_new_tokens={new!r} .* integer >= 1"):
        facade.generate("5 6 7", max_new_tokens=new)


def test_facade_refuses_an_empty_prompt(facade: LanguageModel) -> None:
    with pytest.raises(InputError, match="prompt is empty"):
        facade.generate("")


# Other ways into generate.


@pytest.mark.parametrize("policy", EXACT)
@pytest.mark.parametrize("family", ["llama", "opt", "gemma2"])
def test_embeddings_as_prompt(family: str, policy: str) -> None:
    model = tiny.TINY[family]()
    ids, mask = left_padded(tokens(2, PROMPT), (0, 7))
    inputs: dict[str, Any] = {"attention_mask": mask, "new": 8}
    with torch.no_grad():
        inputs["inputs_embeds"] = model.get_input_embeddings()(ids)
    expected = generate(model, None, **inputs)
    with attach(model, calibrate_tiny(model), covering()) as session:
        actual = generate(model, None, session.new_cache(**EXACT[policy]), **inputs)
    assert actual.tolist() == expected.tolist()
    assert expected.shape == (2, 8)


@pytest.mark.parametrize("policy", EXACT)
def test_sampling_equals_dynamic_cache(llama: tuple[Any, Any], policy: str) -> None:
    model, calibration = llama
    texts = []
    with attach(model, calibration, covering()) as session:
        for cache in (None, session.new_cache(**EXACT[policy])):
            torch.manual_seed(3)
            ids = tokens(2, PROMPT)
            made = generate(model, ids, cache, new=10, do_sample=True, top_k=20, temperature=1.5)
            texts.append(made.tolist())
    assert texts[0] == texts[1]


class Collector(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_streamer_sees_every_token_once(llama: tuple[Any, Any]) -> None:
    model, _ = llama
    ids = tokens(1, PROMPT)
    streamer = Collector()
    with attach(*llama, selecting()) as session:
        made = generate(model, ids, session.new_cache(), new=7, streamer=streamer)
    assert streamer.tokens == [*ids[0].tolist(), *made[0].tolist()]
    assert streamer.ended


def test_forward_with_gradients_enabled(llama: tuple[Any, Any]) -> None:
    model, _ = llama
    ids = tokens(1, PROMPT + 3)
    with attach(*llama, selecting()) as session:
        expected = run(model, session.new_cache(), ids, prompt=PROMPT)
        cache = session.new_cache()
        pieces = [slice(0, PROMPT), *(slice(at, at + 1) for at in range(PROMPT, PROMPT + 3))]
        actual = torch.cat([model(ids[:, piece], cache=cache).logits for piece in pieces], 1)
    assert_close(actual.detach(), expected)


def test_wrong_masks_are_named(llama: tuple[Any, Any]) -> None:
    model, _ = llama
    with attach(*llama, selecting()) as session:
        cache = session.new_cache()
        for mask, fault in (
            (torch.ones(1, 8, dtype=torch.long), r"shape \(1, 8\)"),
            (torch.ones(1, 1, 9, 9, dtype=torch.bool), "4 dimensions"),
        ):
            with pytest.raises(InputError, match=fault):
                model(tokens(1, 9), attention_mask=mask, cache=cache)
        assert cache.get_seq_length() == 0
