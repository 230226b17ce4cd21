"""Settings and fixtures of all tests."""

import importlib.util
import os

# Read when transformers is imported: no test reaches for the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import settings

from infinigen_kv.models.loading import EMBEDDED_INSTALL, EMBEDDED_PACKAGE, LoadedModel, load_model

# Timings on a busy machine say nothing about the code.
settings.register_profile("project", deadline=None)
settings.load_profile("project")


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct in float32, converted on first use into the user's cache folder."""
    if importlib.util.find_spec(EMBEDDED_PACKAGE) is None:
        pytest.skip(f"the embedded model is not installed: {EMBEDDED_INSTALL}")
    return load_model("smollm2", dtype=torch.float32)
