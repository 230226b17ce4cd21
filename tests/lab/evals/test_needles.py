"""Contexts with needles, and lists with forms: what they hold, where, and how they are asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from calibrating import selecting
from command_line import CHARACTERS, tokenizer
from infinigen_kv import Calibration, StorageConfig
from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals import reading
from infinigen_kv_lab.evals.extraction import FORMS, ExtractionTask
from infinigen_kv_lab.evals.needles import DEPTHS, NeedlesTask
from infinigen_kv_lab.evals.registry import make_task
from infinigen_kv_lab.evals.retrieval import Retrieval
from infinigen_kv_lab.evals.run import Subject, evaluate
from infinigen_kv_lab.evals.task import Inputs, Task, TaskOptions
from tiny import llama

HAY = "".join(CHARACTERS[i * 7 % 50] for i in range(1200))


def make(name: str, tmp_path: Path, positions: int | None = None, **options: Any) -> Task:
    path = tmp_path / "hay.txt"
    path.write_text(HAY, encoding="utf-8")
    inputs = Inputs(tokenizer(), positions, None, TaskOptions(text=path, **options))
    return make_task(name, inputs)


def text_of(tokens: Any) -> str:
    return str(tokenizer().decode(tokens))


def test_needles_are_where_they_are_said_to_be(tmp_path: Path) -> None:
    made = make("needles", tmp_path, lengths=(1100, 700), repeats=2)
    assert isinstance(made, NeedlesTask)
    assert [each.length for each in made._haystacks] == [700, 1100, 700, 1100]
    for each in made._haystacks:
        context = text_of(each.context)
        assert len(context) == each.length
        needles = [*re.finditer(r" The magic number of (\w+) is (\d{5})\.", context)]
        assert len({needle[1] for needle in needles}) == len(DEPTHS)
        straw = each.length - sum(len(needle[0]) for needle in needles)
        before = 0
        found = {}
        for needle, depth in zip(needles, DEPTHS, strict=True):
            assert needle.start() - before == round(depth * straw)
            before += len(needle[0])
            found[f"\n\nThe magic number of {needle[1]} is"] = (depth, f" {needle[2]}.")
        assert context.startswith(" The magic") and context.endswith(".")
        asked = {text_of(q): (depth, text_of(a)) for depth, q, a in each.asked}
        assert asked == found
        rest = re.sub(r" The magic number of \w+ is \d{5}\.", "", context)
        assert rest in HAY + HAY


def test_equal_settings_make_equal_contexts_and_more_repeats_add_to_them(tmp_path: Path) -> None:
    first = make("needles", tmp_path, lengths=(700,), repeats=1)
    more = make("needles", tmp_path, lengths=(700,), repeats=3)
    other = make("needles", tmp_path, lengths=(700,), repeats=1, seed=9)
    assert isinstance(first, NeedlesTask) and isinstance(more, NeedlesTask)
    assert isinstance(other, NeedlesTask)
    assert first.settings == more.settings != other.settings
    assert first._haystacks[0].context.equal(more._haystacks[0].context)
    assert not first._haystacks[0].context.equal(more._haystacks[1].context)
    assert not first._haystacks[0].context.equal(other._haystacks[0].context)


@pytest.mark.parametrize("name", ["needles", "extraction"])
def test_every_answer_is_asked_for(name: str, tmp_path: Path, calibration: Calibration) -> None:
    made = make(name, tmp_path, lengths=(800,), repeats=1)
    subject = Subject(
        llama(max_position_embeddings=2048), calibration, selecting(), StorageConfig()
    )
    full, ours = evaluate(subject, made, ["ideal", "infinigen"])
    assert isinstance(ours.result, Retrieval) and isinstance(full.result, Retrieval)
    assert ours.result.asked == (5 if name == "needles" else 6 * FORMS)
    assert {cell.length for cell in ours.result.cells} == {800}
    assert full.result.fetched_share == 1.0 and 0.0 < ours.result.fetched_share < 0.31
    fields = list(ours.result.by_field)
    assert len(fields) == (0 if name == "needles" else 6)
    assert len(ours.result.by_turn) == ours.result.asked


@pytest.mark.parametrize("policy", ["ideal", "infinigen"])
def test_all_questions_are_asked_of_a_cache_that_was_built_once(
    policy: str, tmp_path: Path, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make("needles", tmp_path, lengths=(800,), repeats=2)
    assert isinstance(made, NeedlesTask)
    read: list[int] = []
    prefill = reading.prefill

    def counting(session: Any, cache: Any, ids: Any) -> Any:
        read.append(ids.shape[1])
        return prefill(session, cache, ids)

    monkeypatch.setattr(reading, "prefill", counting)
    model = llama(max_position_embeddings=2048)
    subject = Subject(model, calibration, selecting(), StorageConfig())
    (point,) = evaluate(subject, made, [policy])
    assert read == [len(each.context) for each in made._haystacks] == [800, 800]
    assert isinstance(point.result, Retrieval) and point.result.asked == 2 * len(DEPTHS)


def test_forms_are_the_lists_entries_in_the_lists_form(tmp_path: Path) -> None:
    made = make("extraction", tmp_path, lengths=(1500, 900), repeats=2)
    assert isinstance(made, ExtractionTask)
    assert [each.length for each in made._lists] == [900, 1500, 900, 1500]
    for each in made._lists:
        context = text_of(each.context)
        assert 0.8 * each.length < len(context) <= each.length
        entries = re.findall(r"\nEntry \d{4}\n(?:- .*\n){6}", context)
        assert len(each.forms) == FORMS
        depths = {}
        for depth, fields in each.forms:
            form = "".join(text_of(q) + text_of(a) for _, q, a in fields)
            assert form in entries
            assert depth == entries.index(form) / (len(entries) - 1)
            depths[depth] = form
        assert min(depths) == 0.0 and max(depths) == 1.0 and len(depths) == FORMS


@pytest.mark.parametrize(
    ("name", "options", "positions", "reason"),
    [
        ("needles", {"lengths": (2000,)}, None, "cannot be made from a text of 1200 tokens"),
        ("needles", {"lengths": (128,)}, None, "cannot be made"),
        ("needles", {"lengths": (700,)}, 750, "more than the model's 750 positions"),
        ("extraction", {"lengths": (900,)}, 1000, "more than the model's 1000 positions"),
        ("extraction", {"lengths": (300,)}, None, "choose a longer length"),
    ],
)
def test_contexts_that_cannot_be_made(
    name: str, options: dict[str, Any], positions: int | None, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=reason):
        make(name, tmp_path, positions, repeats=1, **options)


def test_a_text_is_needed() -> None:
    with pytest.raises(InputError, match="--text FILE"):
        make_task("needles", Inputs(tokenizer(), None, None, TaskOptions()))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"lengths": ()}, "lengths"),
        ({"lengths": (100,)}, "lengths=100"),
        ({"repeats": 0}, "repeats=0"),
        ({"window": 1}, "window=1"),
        ({"shots": -1}, "shots=-1"),
        ({"exact_prefix": 0}, "exact_prefix=0"),
        ({"prompt_tokens": True}, "prompt_tokens=True"),
    ],
)
def test_options_out_of_range(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        TaskOptions(**values)
