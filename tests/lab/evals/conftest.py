"""Fixtures of the evaluation's tests."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from calibrating import calibrate_tiny
from infinigen_kv import Calibration
from tiny import llama


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return llama()


@pytest.fixture(scope="session")
def calibration(model: PreTrainedModel) -> Calibration:
    return calibrate_tiny(model)
