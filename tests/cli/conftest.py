"""Fixtures of the command line's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import tiny
from command_line import TEXT, Run, save, tokenizer
from infinigen_kv.calibration.run import calibrate
from infinigen_kv.cli.app import make_app


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny.llama(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibration of the model in `model_folder`."""
    made = calibrate(tiny.llama(), tokenizer(), [TEXT], tokens=1024, use_cache=False)
    return made.save(tmp_path_factory.mktemp("calibration") / "artefact")


@pytest.fixture(scope="session")
def foreign_artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibration of another model."""
    made = calibrate(tiny.qwen2(), tokenizer(), [TEXT], tokens=1024, use_cache=False)
    return made.save(tmp_path_factory.mktemp("foreign") / "artefact")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the program in this process: ``run("generate", folder, "--prompt", "x")``."""
    monkeypatch.setenv("INFINIGEN_KV_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("INFINIGEN_KV_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)

    def invoke(*words: object, **extra: Any) -> Result:
        return CliRunner().invoke(
            make_app(), [str(word) for word in words], prog_name="infinigen-kv", **extra
        )

    return invoke
