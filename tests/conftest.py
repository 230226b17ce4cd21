"""Settings and fixtures of all tests."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path

# Read when transformers is imported: no test reaches for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Read when numba is. Two processes that keep compiled code in one folder at the same moment may
# give one file to two kernels: numba reads its index, adds to it and writes it without a lock.
if "PYTEST_XDIST_WORKER" in os.environ:
    kept = Path(os.environ.get("NUMBA_CACHE_DIR", Path(__file__).parent.parent / ".numba_cache"))
    os.environ["NUMBA_CACHE_DIR"] = str(kept / os.environ["PYTEST_XDIST_WORKER"])

import pytest
import torch
from hypothesis import HealthCheck, settings

from infinigen_kv.models.loading import EMBEDDED_INSTALL, EMBEDDED_PACKAGE, LoadedModel, load_model

# Timings on a busy machine say nothing about the code, and a run is to fail for what was changed,
# not for what was drawn: `pytest --hypothesis-profile=search` draws anew each time.
SEARCH = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", SEARCH)
settings.register_profile("project", SEARCH, derandomize=True)
settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips", action="store_true", help="fail if a test is skipped that needs no GPU"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a compiler there are no tests of compiled code."""
    if importlib.util.find_spec("numba") is None:
        native = [item for item in items if item.get_closest_marker("native")]
        config.hook.pytest_deselected(items=native)
        items[:] = [item for item in items if item not in native]


def _skipped(config: pytest.Config) -> list[str]:
    """Tests and files that were skipped, and may not be."""
    if not config.getoption("--no-skips"):
        return []
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    return [report.nodeid for report in skipped if "gpu" not in report.keywords]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _skipped(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name in _skipped(terminalreporter.config):
        terminalreporter.write_line(f"skipped, which --no-skips forbids: {name}")


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
