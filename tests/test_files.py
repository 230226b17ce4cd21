"""Files that are whole or not there, folders, and strict JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from infinigen_kv import InputError
from infinigen_kv.files import to_json, writable_folder, write_whole


@pytest.mark.parametrize("data", ["text: ä", b"\x00\xff"])
def test_a_file_is_replaced_whole(tmp_path: Path, data: str | bytes) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    write_whole(path, data)
    assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def failing(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", failing)
        with pytest.raises(KeyboardInterrupt):
            write_whole(path, "after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_folder_is_made_or_refused(tmp_path: Path) -> None:
    writable_folder(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(InputError, match=rf"^{occupied}/a: cannot be written to .*choose another"):
        writable_folder(occupied / "a")
    with pytest.raises(InputError, match=rf"^--out {occupied}: cannot be written to"):
        writable_folder(occupied, option="--out")


def test_json_is_strict() -> None:
    text = to_json({"a": math.nan, 1: (math.inf, Path("x"))})
    assert json.loads(text) == {"a": None, "1": [None, "x"]}
