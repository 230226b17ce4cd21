"""Runs that do not fit are refused before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest

import tiny
from calibrating import calibrate_tiny, selecting
from command_line import TEXT, tokenizer
from infinigen_kv import Calibration, InputError, LanguageModel, StorageConfig
from infinigen_kv.memory import budget, calibration_fields, model_request, plan_memory
from infinigen_kv.models.loading import LoadedModel
from linking import failing

PROMPT = TEXT[:300]


@pytest.fixture(scope="module")
def llama() -> tuple[LoadedModel, Calibration]:
    model = tiny.llama()
    return LoadedModel(model, tokenizer(), "tiny"), calibrate_tiny(model)


def needed(llama: tuple[LoadedModel, Calibration], **changes: Any) -> int:
    settings = {
        "context": 310,
        "new_tokens": 10,
        "config": selecting(),
        **calibration_fields(llama[1]),
        **changes,
    }
    return plan_memory(model_request(llama[0].model, **settings)).total("device")


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        ({"full": True}, {"policies": ("stream",)}),
        ({"num_beams": 3}, {"rows": 3}),
        ({"prompt_chunk": 50}, {"prompt_chunk": 50}),
    ],
)
def test_generate_needs_what_is_planned(
    llama: tuple[LoadedModel, Calibration], options: dict[str, Any], changes: dict[str, Any]
) -> None:
    llm = LanguageModel(*llama, selecting())
    enough = needed(llama, **changes)
    with (
        failing(llm.model.model, AssertionError("something was computed")),
        pytest.raises(InputError, match=r"the run needs .* more than the .* there are"),
    ):
        llm.generate(PROMPT, max_new_tokens=10, device_memory=enough - 1, **options)
    made = llm.generate(PROMPT, max_new_tokens=10, device_memory=enough, **options)
    assert len(made.token_ids) == 10


def test_generate_asks_the_machine(
    llama: tuple[LoadedModel, Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LanguageModel(*llama, selecting(), StorageConfig(codec="int8"))
    rest = needed(llama, storage=llm.storage)
    rest -= model_request(llm.model, context=310).geometry.weight_bytes  # loaded by now
    monkeypatch.setattr(budget, "available_memory", lambda: rest - 1)
    with pytest.raises(InputError, match=r"codec='int4' .*device_memory sets another limit"):
        llm.generate(PROMPT, max_new_tokens=10)
    monkeypatch.setattr(budget, "available_memory", lambda: rest)
    assert len(llm.generate(PROMPT, max_new_tokens=10).token_ids) == 10


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "24GiB"])
def test_a_limit_that_is_no_number_of_bytes(
    llama: tuple[LoadedModel, Calibration], limit: Any
) -> None:
    with pytest.raises(InputError, match=r"device_memory=.* is not valid: it must be an integer"):
        LanguageModel(*llama).generate(PROMPT, device_memory=limit)


def test_too_long_a_prompt_is_the_first_thing_said(llama: tuple[LoadedModel, Calibration]) -> None:
    llm = LanguageModel(*llama)
    with pytest.raises(InputError, match="512 positions"):
        llm.generate(TEXT[:600], device_memory=1)


def test_a_paper_link_is_measured_only_where_the_whole_cache_fits(
    llama: tuple[LoadedModel, Calibration],
) -> None:
    storage = StorageConfig(link="emulated:paper", codec="int4", resident=0, resident_layers=())
    llm = LanguageModel(*llama, selecting(), storage)
    twice = needed(llama, storage=storage)
    assert twice > needed(llama, storage=StorageConfig(link="emulated:1", codec="int4", resident=0))
    with (
        failing(llm.model.model, AssertionError("something was computed")),
        pytest.raises(InputError, match="the run needs"),
    ):
        llm.generate(PROMPT, max_new_tokens=10, device_memory=twice - 1)
