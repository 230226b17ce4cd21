"""Tasks that look into the model: made by name, and what they come to for people and for JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from calibrating import selecting
from command_line import TEXT, tokenizer
from infinigen_kv import Calibration, StorageConfig
from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.registry import make_task
from infinigen_kv_lab.evals.run import Subject, evaluate, samples_kept
from infinigen_kv_lab.evals.store import SampleStore
from infinigen_kv_lab.evals.task import Inputs, TaskOptions

TASKS = ("similarity", "attention", "sparsity", "skew")


@pytest.fixture
def options(tmp_path: Path) -> TaskOptions:
    path = tmp_path / "own.txt"
    path.write_text(TEXT, encoding="utf-8")
    return TaskOptions(window=150, prompt_tokens=120, text=path, lengths=(128, 150))


@pytest.mark.parametrize("name", TASKS)
def test_results_are_for_people_and_for_json(
    name: str, options: TaskOptions, model: PreTrainedModel, calibration: Calibration
) -> None:
    task = make_task(name, Inputs(tokenizer(), 512, None, options))
    assert len(task) == len(TEXT) // 150
    subject = Subject(model, calibration, selecting(), StorageConfig())
    (point,) = evaluate(subject, task, ["infinigen" if name == "attention" else "ideal"], limit=2)
    headline = point.result.headline()
    assert headline and all(isinstance(each, str) for each in headline.values())
    held = json.loads(json.dumps(point.to_dict(), allow_nan=False))
    assert held["result"]["windows"] == 2 and held["samples"] == 2


@pytest.mark.parametrize("name", TASKS)
def test_a_text_is_needed(name: str) -> None:
    with pytest.raises(InputError, match=f"task '{name}' needs a long text"):
        make_task(name, Inputs(tokenizer(), 512, None, TaskOptions(lengths=(128,))))


def test_what_is_kept_is_counted_without_measuring(
    options: TaskOptions, model: PreTrainedModel, calibration: Calibration, tmp_path: Path
) -> None:
    task = make_task("attention", Inputs(tokenizer(), 512, None, options))
    subject = Subject(model, calibration, selecting(), StorageConfig())
    store = SampleStore(tmp_path / "points")
    policies = ["infinigen", "h2o"]
    assert samples_kept(subject, task, policies, store, limit=3) == 0
    evaluate(subject, task, ["h2o"], limit=3, store=store)
    assert samples_kept(subject, task, policies, store, limit=3) == 0
    evaluate(subject, task, ["infinigen"], limit=2, store=store)
    assert samples_kept(subject, task, policies, store, limit=3) == 2
    assert samples_kept(subject, task, policies, store, limit=1) == 1
    with pytest.raises(InputError, match="suits none"):
        samples_kept(subject, task, ["ideal"], store, limit=1)
