"""Models that compute NaN get an error from every task, and no figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import tiny
from calibrating import selecting
from command_line import TEXT, tokenizer
from infinigen_kv import Calibration, InfiniGenError, StorageConfig
from infinigen_kv.calibration.fingerprint import model_fingerprint
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv_lab.evals.registry import make_task
from infinigen_kv_lab.evals.run import Subject, evaluate
from infinigen_kv_lab.evals.store import SampleStore
from infinigen_kv_lab.evals.task import Inputs, TaskOptions

SAID = r"contain NaN or infinity.* check the model's weights and dtype"


def broken(part: str, value: float) -> Any:
    model = tiny.llama()
    with torch.no_grad():
        model.get_submodule(part).weight[0, 0] = value
    return model


def evaluated(
    name: str, policy: str, model: PreTrainedModel, calibration: Calibration, folder: Path
) -> None:
    text = folder / "own.txt"
    text.write_text(TEXT, encoding="utf-8")
    options = TaskOptions(window=150, prompt_tokens=120, text=text, lengths=(300,), repeats=1)
    task = make_task(name, Inputs(tokenizer(), tiny.MAX_POSITIONS, None, options))
    subject = Subject(model, calibration, selecting(), StorageConfig())
    evaluate(subject, task, [policy], limit=1, store=SampleStore(folder / "kept"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "policy"),
    [("text", "ideal"), ("text", "infinigen"), ("text", "stream"), ("needles", "ideal")],
)
def test_logits(
    name: str, policy: str, value: float, calibration: Calibration, tmp_path: Path
) -> None:
    with pytest.raises(InfiniGenError, match=f"logits {SAID}"):
        evaluated(name, policy, broken("lm_head", value), calibration, tmp_path)
    assert not list((tmp_path / "kept").iterdir()), "there is nothing worth keeping"


@pytest.mark.parametrize("name", ["similarity", "sparsity", "skew", "attention", "speculation"])
@pytest.mark.parametrize("part", ["model.layers.1.mlp.down_proj", "model.layers.3.mlp.down_proj"])
def test_what_the_model_computes_inside(
    name: str, part: str, calibration: Calibration, tmp_path: Path
) -> None:
    """Also in the last layer, after which nothing is looked at but what it passes on."""
    model = broken(part, 0.0)
    with torch.no_grad():
        model.get_submodule(part).weight.fill_(3e38)  # sums of such overflow
    made = replace(calibration, fingerprint=model_fingerprint(adapter_for(model)))
    policy = "infinigen" if name in ("attention", "speculation") else "ideal"
    with pytest.raises(InfiniGenError, match=SAID):
        evaluated(name, policy, model, made, tmp_path)


def test_weights(calibration: Calibration, tmp_path: Path) -> None:
    model = broken("model.layers.1.mlp.down_proj", float("nan"))
    with pytest.raises(InfiniGenError, match=rf"weights {SAID}"):
        evaluated("text", "ideal", model, calibration, tmp_path)
