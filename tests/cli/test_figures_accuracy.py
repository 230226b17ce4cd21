"""``infinigen-kv figures accuracy``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accuracy_data import data_folder
from command_line import Run, last_json, refusal
from infinigen_kv_lab.evals import similarity


@pytest.fixture
def accuracy(run: Run, model_folder: Path, artefact: Path, tmp_path: Path) -> Run:
    """Run it with the tiny model, into ``tmp_path / "out"``."""
    data = data_folder(tmp_path / "data")

    def invoke(*words: object) -> Any:
        own = ("--calibration", artefact, "--out", tmp_path / "out", "--quick")
        where = () if "--data" in words else ("--data", data)
        return run("figures", "accuracy", model_folder, *own, *where, *words)

    return invoke


def test_figures_and_page(accuracy: Run, tmp_path: Path, model_folder: Path) -> None:
    found = last_json(accuracy("--figures", "table-1,7", "--windows", 1, "--json"))
    out = tmp_path / "out"
    files = {
        name: [str(out / f"{stem}.{kind}") for kind in ("png", "csv", "json")]
        for name, stem in (("table-1", "table-1"), ("7", "figure-7"))
    }
    assert found == {"page": str(out / "index.html"), "figures": files, "missing": {}}
    page = (out / "index.html").read_text()
    assert "infinigen-kv figures accuracy" in page and "--windows 1" in page
    assert "Measured on: similarity: 1 of " in page and model_folder.name in page

    again = accuracy("--figures", "table-1,7", "--windows", 1)
    assert again.exit_code == 0 and "2 of 2 points were measured before" in again.stderr
    assert again.stdout.splitlines() == [files["table-1"][0], files["7"][0], found["page"]]

    more = accuracy("--figures", "table-1", "--windows", 2)
    assert "[1/1] similarity" in more.stderr
    held = json.loads((out / "table-1.json").read_text())
    assert any(each.startswith("Measured on: similarity: 2 of ") for each in held["remarks"])


def test_ctrl_c(accuracy: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*unused: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(similarity.SimilarityTask, "measure", interrupted)
    result = accuracy("--figures", "7,table-1")
    assert result.exit_code == 130 and "finished points are kept" in result.stderr
    assert not (tmp_path / "out" / "table-1.png").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--figures", "speculatoin"), "did you mean speculation? there are table-1, 4, 5"),
        (("--figures", "14"), "there are table-1, 4, 5, 7, 11, 12, 13, table-2, 19, 20, passkey"),
        (("--data", "nowhere"), "--data nowhere: no such folder: fetch what you need of wikitext2"),
        (("--data", "."), "--data .: holds none of the files"),
        (("--text", "missing.txt"), "--text missing.txt: cannot be read"),
    ],
)
def test_bad_options(accuracy: Run, words: tuple[str, ...], reason: str) -> None:
    result = accuracy(*words)
    assert reason in refusal(result)
    assert "loading" not in result.stderr


def test_data_of_no_figure_is_there(accuracy: Run, tmp_path: Path) -> None:
    (tmp_path / "data" / "passkey" / "passkey_generated.jsonl").unlink()
    result = accuracy("--figures", "passkey")
    assert result.exit_code == 2 and "Traceback" not in result.stderr
    assert "passkey_generated.jsonl is missing: fetch passkey prompts" in result.stderr
    assert "none of the figures could be drawn" in result.stderr
