"""``infinigen-kv calibrate``."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import tiny
from command_line import Run, last_json, refusal
from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.models.adapters import adapter_for


def test_artefact_fits_the_model(
    run: Run, model_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "new" / "artefact"
    result = run(
        *("calibrate", model_folder, "--text", text_file, "--tokens", 600),
        *("--output", output, "--json"),
    )
    found = last_json(result)
    made = Calibration.load(output)
    made.check_model(adapter_for(tiny.llama()))
    assert found["artefact"] == str(output)
    assert found["settings"] == dict(made.settings)
    assert found["settings"]["tokens"] == 600
    assert found["layers"].keys() == {"1", "2", "3"}
    assert "with correction" in result.stdout
    stages = ["collecting", "fitting", "skew", "saving"]
    assert list(found["cost"]) == stages and found["cost"] == dict(made.cost)
    assert all(each["seconds"] > 0 for each in found["cost"].values())
    lines = [line.split() for line in result.stdout.splitlines()]
    shown = {line[0]: line[1] for line in lines if line and line[0] in (*stages, "all")}
    total = sum(each["seconds"] for each in found["cost"].values())
    assert list(shown) == [*stages, "all"] and shown["all"] == f"{total:.2f}"


def test_without_output_the_cache_holds_it(
    run: Run, model_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    result = run("calibrate", model_folder, "--text", text_file, "--json")
    folder = Path(last_json(result)["artefact"])
    assert folder.parent == tmp_path / "cache" / "calibrations"
    assert Calibration.load(folder).report


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"\xff\xfe", "not UTF-8 text (byte 0)"),
        (b"", "the text is empty"),
    ],
)
def test_bad_text_is_refused_before_the_model_is_loaded(
    run: Run, tmp_path: Path, text_file: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    result = run("calibrate", "./no-model", "--text", text_file, "--text", path)
    assert f"--text {path}: {reason}" in refusal(result)
    assert "loading" not in result.stderr


def test_text_without_permission(
    run: Run, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:  # root would read whatever the mode is
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    result = run("calibrate", "./no-model", "--text", text_file)
    assert "cannot be read (Permission denied)" in refusal(result)


def test_text_too_short(run: Run, model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("too short", encoding="utf-8")
    result = run("calibrate", model_folder, "--text", path, "--output", tmp_path / "out")
    assert "has 9 tokens: it must have at least 256" in refusal(result)
    assert not (tmp_path / "out").exists()


def test_output_that_holds_something_else_is_kept(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work", encoding="utf-8")
    result = run("calibrate", "./no-model", "--output", folder)
    assert "is not a calibration: choose another output folder" in refusal(result)
    assert (folder / "thesis.txt").read_text(encoding="utf-8") == "years of work"


def test_output_below_a_file(run: Run, text_file: Path) -> None:
    result = run("calibrate", "./no-model", "--output", text_file / "artefact")
    assert "cannot be written to" in refusal(result)


def test_unknown_model_writes_nothing(run: Run, tmp_path: Path) -> None:
    result = run("calibrate", "./no-model", "--output", tmp_path / "out")
    assert "no such file or folder" in refusal(result)
    assert not (tmp_path / "out").exists()
