"""Passkey prompts: how they are put together, and what is left out or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from calibrating import selecting
from command_line import tokenizer
from infinigen_kv import Calibration, StorageConfig, attach
from infinigen_kv.cache.forward import forward, prefill
from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.passkey import PasskeyTask
from infinigen_kv_lab.evals.registry import make_task
from infinigen_kv_lab.evals.retrieval import Retrieval
from infinigen_kv_lab.evals.run import Subject, evaluate
from infinigen_kv_lab.evals.task import Inputs, TaskOptions

TEMPLATE = "Find it.\n\n{context}\n{input}\nThe pass key is"


def record(size: int, **changes: Any) -> dict[str, Any]:
    values = {
        "input": "What is the pass key?",
        "context": "The pass key is 12345. " + "Grass is green. " * size,
        "answer": "12345",
        "target_len": 64 * size,
        "depth": 0.0,
    }
    return {**values, **changes}


def folder(path: Path, *records: dict[str, Any], template: str = TEMPLATE) -> Path:
    (path / "passkey").mkdir()
    lines = "".join(json.dumps(each) + "\n" for each in records)
    (path / "passkey" / "passkey_generated.jsonl").write_text(lines, encoding="utf-8")
    (path / "passkey" / "prompt_template.txt").write_text(template, encoding="utf-8")
    return path


def make(data: Path | None, positions: int | None = 512, **options: Any) -> PasskeyTask:
    made = make_task("passkey", Inputs(tokenizer(), positions, data, TaskOptions(**options)))
    assert isinstance(made, PasskeyTask)
    return made


def test_the_template_is_filled_and_the_question_can_come_later(tmp_path: Path) -> None:
    made = make(folder(tmp_path, record(10), record(2)))
    (first, pieces), (second, _) = made._prompts
    assert (first["target_len"], second["target_len"]) == (128, 640)  # shortest first
    texts = [tokenizer().decode(piece) for piece in pieces]
    assert texts == [
        f"Find it.\n\n{record(2)['context']}",
        "\nWhat is the pass key?\nThe pass key is",
        " 12345",
    ]


def test_prompts_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    data = folder(tmp_path, record(2), record(40))
    assert len(make(data)) == 1
    assert len(make(data, None)) == 2
    with pytest.raises(InputError, match="no prompt fits the model's 50 positions"):
        make(data, 50)


@pytest.mark.parametrize("later", [False, True])
def test_what_is_read_in_full_and_what_in_steps(
    later: bool, tmp_path: Path, model: PreTrainedModel, calibration: Calibration
) -> None:
    made = make(folder(tmp_path, record(2), record(40)), asked_later=later)
    subject = Subject(model, calibration, selecting(), StorageConfig())
    full, ours = evaluate(subject, made, ["ideal", "infinigen"])
    assert isinstance(ours.result, Retrieval) and isinstance(full.result, Retrieval)
    assert (ours.result.asked, ours.result.too_long) == (1, 1)
    assert full.result.fetched_share == 1.0
    assert 0.0 < ours.result.fetched_share < 0.31
    assert ours.result.difference is not None and full.result.difference is None
    # the share that was fetched is that of single steps from where the prompt ends
    _, (context, question, answer) = made._prompts[0]
    ids = torch.cat([context, question, answer])
    prompt = len(context) + (0 if later else len(question))
    with attach(model, calibration, selecting()) as session:
        cache = session.new_cache()
        first = prefill(session, cache, ids[None, :prompt])[0]
        cache.recorder = recorder = FetchRecorder()
        steps = [forward(model, ids[None, at : at + 1], cache)[0] for at in range(prompt, len(ids))]
    assert ours.result.fetched_share == pytest.approx(recorder.fetched_share(first_layer=1))
    rows = torch.cat([first, *steps])[-len(answer) - 1 : -1].double().log_softmax(-1)
    total = rows.gather(1, answer[:, None]).sum().item()
    assert ours.result.log_probability == pytest.approx(total, abs=1e-2)
    assert ours.result.right == int((rows.argmax(-1) == answer).all())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"depth": ...}, "line 2: no field 'depth'"),
        ({"answer": ...}, "line 2: no field 'answer'"),
        ({"depth": "0.5"}, "line 2: depth='0.5' is not valid: it must be a number"),
        ({"target_len": None}, "line 2: target_len=None is not valid: it must be a number"),
        ({"answer": 12345}, "line 2: answer=12345 is not valid: it must be a text"),
        ({"answer": ""}, "line 2: answer is empty: it must be a text"),
    ],
)
def test_bad_records(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    bad = {name: value for name, value in record(2, **changes).items() if value is not ...}
    with pytest.raises(InputError, match=reason):
        make(folder(tmp_path, record(2), bad))


def test_templates_without_places(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the template must hold .context. and after it .input."):
        make(folder(tmp_path, record(2), template="{input} {context}"))


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs passkey prompts as JSON Lines"):
        make(None)
    with pytest.raises(InputError, match=r"passkey_generated\.jsonl is missing: fetch"):
        make(tmp_path)


def test_other_records_are_other_points(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = make(folder(tmp_path / "a", record(2)))
    second = make(folder(tmp_path / "b", record(3)))
    assert first.settings != second.settings
