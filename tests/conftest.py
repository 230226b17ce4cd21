"""Settings and fixtures of all tests."""

import importlib.util
import os
import random

# Read when transformers is imported: no test reaches for the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings

from infinigen_kv.models.loading import EMBEDDED_INSTALL, EMBEDDED_PACKAGE, LoadedModel, load_model

# Timings on a busy machine say nothing about the code, and a run fails for what was changed, not
# for what was drawn: `pytest --hypothesis-profile=search` draws anew each time.
SEARCH = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", SEARCH)
settings.register_profile("project", SEARCH, derandomize=True)
settings.load_profile("project")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws does not depend on the tests before it."""
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct in float32, converted on first use into the user's cache folder."""
    if importlib.util.find_spec(EMBEDDED_PACKAGE) is None:
        pytest.skip(f"the embedded model is not installed: {EMBEDDED_INSTALL}")
    return load_model("smollm2", dtype=torch.float32)
