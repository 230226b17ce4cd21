"""Outputs that an attached model or a facade of one text cannot give are refused, not left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import tiny
from calibrating import calibrate_tiny, generate, selecting, tokens
from command_line import tokenizer
from infinigen_kv import InfiniGenError, InputError, LanguageModel, attach
from infinigen_kv.cache.forward import cache_argument
from infinigen_kv.models.loading import LoadedModel

IDS = tokens(1, 12)


def by_generate(model: PreTrainedModel, cache: Any) -> Any:
    options = {"output_attentions": True, "return_dict_in_generate": True}
    return generate(model, IDS, cache, new=2, **options)


def by_forward(model: PreTrainedModel, cache: Any) -> Any:
    return model(input_ids=IDS, output_attentions=True, **{cache_argument(model): cache})


def by_decoder(model: PreTrainedModel, cache: Any) -> Any:
    return model.get_decoder()(IDS, output_attentions=True)


def by_configuration(model: PreTrainedModel, cache: Any) -> Any:
    return model(input_ids=IDS, **{cache_argument(model): cache})


@pytest.mark.parametrize("family", tiny.TINY)
@pytest.mark.parametrize("ask", [by_generate, by_forward, by_decoder, by_configuration])
def test_attention_weights(family: str, ask: Callable[[PreTrainedModel, Any], Any]) -> None:
    model = tiny.TINY[family]()
    if ask is by_configuration:
        model.set_attn_implementation("eager")  # Transformers wants that first
        model.config.output_attentions = True
    with attach(model) as session:
        cache = session.new_cache(tokens=20, policy="ideal")
        with pytest.raises(InputError, match=r"output_attentions=True is not valid on an attached"):
            ask(model, cache)
        assert cache.get_seq_length() == 0
    plain = tiny.TINY[family]()
    plain.set_attn_implementation("eager")
    weights = plain(input_ids=IDS, output_attentions=True).attentions
    assert all(isinstance(each, Tensor) for each in weights), "outside they are there"


@pytest.mark.parametrize("family", tiny.TINY)
def test_hidden_states_are_given(family: str) -> None:
    model = tiny.TINY[family]()
    wanted = model(input_ids=IDS, output_hidden_states=True).hidden_states
    with attach(model) as session:
        cache = session.new_cache(tokens=20, policy="ideal")
        arguments = {cache_argument(model): cache, "output_hidden_states": True}
        with torch.no_grad():
            found = model(input_ids=IDS, **arguments).hidden_states
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def llm() -> LanguageModel:
    model = tiny.llama()
    return LanguageModel(
        LoadedModel(model, tokenizer(), "tiny"), calibrate_tiny(model), selecting()
    )


@pytest.mark.parametrize(
    "options",
    [
        {"num_return_sequences": 2, "do_sample": True},
        {"num_return_sequences": 2, "num_beams": 2},
        {"return_dict_in_generate": True},
        {"output_attentions": True},
        {"output_hidden_states": True},
        {"output_scores": True},
        {"output_logits": True},
    ],
)
def test_one_text_has_no_room_for_more(llm: LanguageModel, options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(InputError, match=rf"{name}=.* is not valid here, where one text is ret"):
        llm.generate("abcde", max_new_tokens=2, **options)


def test_a_checkpoint_that_asks_for_more_is_read_greedily(llm: LanguageModel) -> None:
    own = llm.generate("abcde", max_new_tokens=8).token_ids
    settings = llm.model.generation_config
    before = settings.to_dict()
    settings.update(
        num_beams=4, num_return_sequences=3, return_dict_in_generate=True, output_attentions=True
    )
    try:
        assert llm.generate("abcde", max_new_tokens=8).token_ids == own
    finally:
        settings.update(**before)


def test_settings_of_a_checkpoint_that_mean_nothing(llm: LanguageModel) -> None:
    settings = llm.model.generation_config
    settings.repetition_penalty = -1.0
    try:
        with pytest.raises(InputError, match=r"generation_config, are not valid: .*penalty.*-1\.0"):
            llm.generate("abcde", max_new_tokens=2)
    finally:
        settings.repetition_penalty = None


def test_logits_of_nan_end_a_text_that_has_begun(llm: LanguageModel) -> None:
    """The model breaks in the fourth step."""
    seen = []

    def break_late(module: Any, args: Any, output: Tensor) -> Tensor:
        seen.append(output)
        return output * torch.nan if len(seen) == 4 else output

    handle = llm.model.lm_head.register_forward_hook(break_late)
    try:
        with pytest.raises(InfiniGenError, match="logits contain NaN or infinity"):
            llm.generate("abcde", max_new_tokens=8)
    finally:
        handle.remove()
    assert len(seen) == 4
