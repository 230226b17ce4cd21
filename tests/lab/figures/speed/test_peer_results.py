"""Results files of other programs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from infinigen_kv import InputError
from infinigen_kv_lab.figures.speed.peer_results import (
    ACCURACY,
    FORMAT,
    SPEED,
    prompt_digest,
    read_peer_results,
)

SPEEDS = {"system": "llama.cpp", "context": 1, "tokens_per_s": 50.0}
PRESS = {"system": "SnapKV", "setting": "keep 0.2", "link_bytes_per_token": 9e6, "kl_to_ideal": 0.1}


def written(tmp_path: Path, **changes: Any) -> Path:
    values = {"format": FORMAT, "source": "program 1", "points": [SPEEDS, PRESS], **changes}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(values))
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    program = read_peer_results(written(tmp_path, settings={"prompt_sha256": "x"}))
    assert program.source == "program 1" and program.settings == {"prompt_sha256": "x"}
    assert program.with_columns(SPEED) == [SPEEDS]
    assert program.with_columns(ACCURACY) == [PRESS]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "other"}, "its format is not"),
        ({"points": []}, "'points'"),
        ({"points": "many"}, "'points'"),
        ({"points": [SPEEDS, {"context": 1, "tokens_per_s": 1}]}, "point 2 names no 'system'"),
        ({"points": [{"system": "x", "context": 1}]}, "point 1 has neither"),
        ({"points": [{**SPEEDS, "tokens_per_s": "fast"}]}, "tokens_per_s='fast'"),
        ({"points": [{**PRESS, "kl_to_ideal": -1}]}, "kl_to_ideal=-1"),
        ({"points": [{**SPEEDS, "context": True}]}, "context=True"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(InputError, match=reason) as caught:
        read_peer_results(path)
    assert str(path) in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_peer_results(tmp_path / "missing.json")
    path = tmp_path / "text.json"
    path.write_text("no JSON")
    with pytest.raises(InputError, match="is not JSON"):
        read_peer_results(path)


def test_the_digest_is_what_the_scripts_compute() -> None:
    assert prompt_digest((1, 22, 333)) == hashlib.sha256(b"[1, 22, 333]").hexdigest()
