"""A model that computes NaN gets an error where figures are measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

import tiny
from calibrating import calibrate_tiny, selecting, tokens
from infinigen_kv import Calibration, InfiniGenError, attach
from infinigen_kv.models.soundness import check_logits
from infinigen_kv_lab.bench.fidelity import measure_fidelity
from infinigen_kv_lab.bench.run import bench

SAID = r"logits contain NaN or infinity.* check the model's weights and dtype"


def with_broken_head(value: float) -> PreTrainedModel:
    model = tiny.llama()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = value
    return model


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate_tiny(tiny.llama())


def measure_bench(model: PreTrainedModel, calibration: Calibration) -> None:
    with attach(model, calibration, selecting()) as session:
        bench(session, tokens(2, 20), decode_tokens=1, policies=["infinigen"])


def measure_text(model: PreTrainedModel, calibration: Calibration) -> None:
    measure_fidelity(model, calibration, selecting(), tokens(1, 30)[0], prompt_tokens=20)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("measure", [measure_bench, measure_text])
def test_a_broken_head(
    measure: Callable[[PreTrainedModel, Calibration], None], value: float, calibration: Calibration
) -> None:
    with pytest.raises(InfiniGenError, match=SAID):
        measure(with_broken_head(value), calibration)


def test_tokens_that_a_model_rules_out_are_no_fault() -> None:
    logits = torch.zeros(3, 5)
    logits[:, 2:] = -torch.inf
    check_logits(logits)
    for value in (torch.nan, torch.inf):
        logits[1, 0] = value
        with pytest.raises(InfiniGenError, match=SAID):
            check_logits(logits)
