"""``infinigen-kv diagnose``: the report, the page, JSON, and what it refuses."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import tiny
from command_line import TEXT, Run, last_json, refusal, save, tokenizer
from infinigen_kv import InfiniGenConfig, calibrate
from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv_lab.cli.diagnose import TextOptions
from infinigen_kv_lab.diagnosis import Windows, diagnose

SIZES = ("--prompt-tokens", 270, "--decode-tokens", 32, "--windows", 1)


@pytest.fixture
def words(model_folder: Path, artefact: Path, text_file: Path) -> tuple[Any, ...]:
    return ("diagnose", model_folder, "--calibration", artefact, "--text", text_file, *SIZES)


def test_json_holds_what_the_library_measures(
    run: Run, words: tuple[Any, ...], artefact: Path
) -> None:
    result = run(*words, "--alpha", 3, "--json")
    found = last_json(result)
    assert "Verdict: " in result.stdout  # the report goes before it
    windows = Windows.spread(tokenizer()(TEXT)["input_ids"], prompt=270, decoded=32, count=1)
    expected = diagnose(
        tiny.llama(), Calibration.load(artefact), windows, InfiniGenConfig(alpha=3.0)
    )
    theirs = expected.to_dict()
    assert found["verdict"]["level"] == theirs["verdict"]["level"]
    assert found["policies"]["infinigen"]["kl"]["value"] == pytest.approx(
        theirs["policies"]["infinigen"]["kl"]["value"], rel=1e-4
    )
    for ours, other in zip(found["evidence"]["layers"], theirs["evidence"]["layers"], strict=True):
        heads = other.pop("head_coverage")
        assert ours.pop("head_coverage") == pytest.approx(heads, rel=1e-3)
        assert ours == pytest.approx(other, rel=1e-3, abs=1e-6)
    assert found["evidence"]["config"]["alpha"] == 3.0
    assert found["html"] is None and found["text"].endswith("text.txt")


def test_the_report_fits_and_names_the_weak_layers(run: Run, words: tuple[Any, ...]) -> None:
    result = run(*words)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("Verdict: ") for line in lines)
    assert "not selecting: 0 (first layer: no predecessor to rehearse from)" in lines
    for part in ("infinigen-paper", "oracle", "What would help:", "flat attention: "):
        assert part in result.stdout, part
    rows = [line.split() for line in lines if line.split()[:1] == ["!"]]
    assert [row[1] for row in rows] == ["1", "2", "3"]


@pytest.mark.skipif(importlib.util.find_spec("jinja2") is None, reason="needs jinja2")
def test_the_page(run: Run, words: tuple[Any, ...], tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    result = run(*words, "--html", page, "--alpha", 3)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith(f"{page}\n")
    html = page.read_text(encoding="utf-8")
    assert "--alpha 3.0" in html and "--windows 1" in html
    assert "1 window of 270 + 32" in html and "flat attention" in html
    assert [each.name for each in page.parent.iterdir()] == ["page.html"]


def test_the_text_is_held_back_by_default(
    run: Run, model_folder: Path, artefact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def look(model: Any, calibration: Any, windows: Windows, *others: Any, **more: Any) -> None:
        seen["windows"] = windows
        raise ZeroDivisionError

    monkeypatch.setattr("infinigen_kv_lab.diagnosis.diagnose", look)
    run("diagnose", model_folder, "--calibration", artefact)
    # the model has 512 positions: a quarter of them is decoded, two windows are read
    assert tuple(seen["windows"].ids.shape) == (2, 512)
    assert seen["windows"].prompt == 384


@pytest.mark.parametrize(
    ("positions", "given", "expected"),
    [
        (None, {}, (2048, 256)),
        (8192, {}, (2048, 256)),
        (2048, {}, (1792, 256)),
        (512, {}, (384, 128)),
        (512, {"decode_tokens": 32}, (480, 32)),
        (512, {"prompt_tokens": 300}, (300, 128)),
        (40, {}, (8, 32)),
        (20, {}, (1, 32)),
    ],
)
def test_sizes_of_windows(
    positions: int | None, given: dict[str, int], expected: tuple[int, int]
) -> None:
    assert TextOptions(**given).sizes(positions) == expected  # type: ignore[arg-type]


def test_a_text_that_was_calibrated_on_is_not_held_back(
    run: Run, model_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    made = calibrate(tiny.llama(), tokenizer(), [TEXT], tokens=1024, use_cache=False)
    folder = made.save(tmp_path / "made")
    result = run(*("diagnose", model_folder, "--calibration", folder, "--text", text_file, *SIZES))
    assert "calibrated on this very text" in result.stderr


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (("--prompt-tokens", 1480, "--decode-tokens", 32), "the text has 1500 tokens"),
        (("--prompt-tokens", 485, "--decode-tokens", 32), "517 tokens is longer than the model's"),
        (("--prompt-tokens", 200), "nothing is selected before the context has 256"),
        (("--decode-tokens", 31), "'--decode-tokens'"),
        (("--windows", 0), "'--windows'"),
        (("--alpha", "-1"), "--alpha -1.0"),
        (("--text", "none.txt"), "--text none.txt: cannot be read"),
        (("--html", "."), "--html .: a folder: name a file in it"),
        (("--html", "text.txt/page.html"), "text.txt: cannot be written to"),
    ],
)
def test_refusals(run: Run, words: tuple[Any, ...], changes: tuple[Any, ...], reason: str) -> None:
    assert reason in refusal(run(*words, *changes))


def test_refusals_come_before_a_model_is_calibrated(
    run: Run, tmp_path: Path, text_file: Path
) -> None:
    folder = save(tiny.llama(num_hidden_layers=1), tmp_path / "single")
    result = run("diagnose", folder, "--text", text_file, *SIZES)
    assert "none of the model's 1 layers can select" in refusal(result)
    assert "calibrating" not in result.stderr


def test_a_foreign_calibration(
    run: Run, model_folder: Path, foreign_artefact: Path, text_file: Path
) -> None:
    words = ("diagnose", model_folder, "--calibration", foreign_artefact, "--text", text_file)
    assert "belongs to another model" in refusal(run(*words, *SIZES))
