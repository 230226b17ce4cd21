"""``infinigen-kv demo``: what it refuses, and once for real."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from command_line import Run, last_json, refusal
from infinigen_kv.models.loading import EMBEDDED_PACKAGE


def test_output_that_cannot_be_written(run: Run, text_file: Path) -> None:
    result = run("demo", "--output", text_file / "demo")
    assert f"--output {text_file / 'demo'}: cannot be written to" in refusal(result)
    assert "loading" not in result.stderr


def test_bad_dtype_writes_nothing(run: Run, tmp_path: Path) -> None:
    assert "--dtype 'int8'" in refusal(run("demo", "--output", tmp_path / "out", "--dtype", "int8"))
    assert not (tmp_path / "out").exists()


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in (EMBEDDED_PACKAGE, "matplotlib")),
    reason="needs the embedded model and matplotlib",
)
def test_calibrated_selection_stays_close_to_the_full_cache(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INFINIGEN_KV_CACHE")  # the converted model may be there already
    result = run("demo", "--output", tmp_path / "out", "--json")
    found = last_json(result)
    assert json.loads((tmp_path / "out" / "demo.json").read_text(encoding="utf-8")) == found
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    full, paper, calibrated = found["systems"]
    assert [each["name"] for each in (full, paper, calibrated)] == ["full", "paper", "calibrated"]
    assert 5_900 <= found["prompt_tokens"] <= 6_100
    assert calibrated["fetched_share"] < 0.1
    assert calibrated["kl_mean"] < 0.05
    assert calibrated["kl_mean"] < paper["kl_mean"]
    assert full["text"] in result.stdout
