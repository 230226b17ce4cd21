"""Measured points on disk."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from infinigen_kv import InputError
from infinigen_kv import files as store_module
from infinigen_kv.files import PointStore
from infinigen_kv_lab.figures.point import Point

POINT = Point(policies=("stream", "h2o"), prompt_tokens=100, decode_tokens=4, alpha=4.25)
ABOUT = {"model": "a", "threads": 2}


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, said: list[str]) -> PointStore:
    return PointStore(tmp_path / "points", said.append)


def test_a_result_comes_back(store: PointStore, said: list[str]) -> None:
    assert store.get(POINT, ABOUT) is None
    store.put(POINT, ABOUT, {"ms": 1.5, "names": ("a", "b"), "hits": math.nan, "by": {0: 1}})
    assert store.get(POINT, ABOUT) == {
        "ms": 1.5,
        "names": ["a", "b"],
        "hits": None,
        "by": {"0": 1},
    }
    assert said == [], "a point that was never measured is nothing to talk about"


def test_points_with_other_settings_are_apart(store: PointStore) -> None:
    store.put(POINT, ABOUT, {"ms": 1})
    assert store.get(replace(POINT, batch=2), ABOUT) is None
    assert store.get(POINT, {**ABOUT, "model": "b"}) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "damaged"),
        (b'{"result": {"ms"', "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"[1]", "no result"),
        (b'{"result": 3}', "no result"),
        (b'{"result": {"ms": 2}}', "not what its name stands for"),
    ],
)
def test_a_damaged_file_is_measured_again_and_said_so(
    store: PointStore, said: list[str], content: bytes, reason: str
) -> None:
    store.put(POINT, ABOUT, {"ms": 1})
    path = store.path(POINT, ABOUT)
    path.write_bytes(content)
    assert store.get(POINT, ABOUT) is None
    assert len(said) == 1 and reason in said[0] and "measured again" in said[0]
    assert str(path) in said[0]
    store.put(POINT, ABOUT, {"ms": 3})
    assert store.get(POINT, ABOUT) == {"ms": 3}


def test_results_of_another_format_are_measured_again(store: PointStore, said: list[str]) -> None:
    store.put(POINT, ABOUT, {"ms": 1})
    path = store.path(POINT, ABOUT)
    held = json.loads(path.read_bytes())
    path.write_text(json.dumps({**held, "format": held["format"] + 1}))
    assert store.get(POINT, ABOUT) is None and len(said) == 1


def test_a_write_that_fails_leaves_the_old_file(
    store: PointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(POINT, ABOUT, {"ms": 1})

    def failing(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store_module.Path, "replace", failing)
        with pytest.raises(KeyboardInterrupt):
            store.put(POINT, ABOUT, {"ms": 2})
    assert store.get(POINT, ABOUT) == {"ms": 1}
    folder = store.path(POINT, ABOUT).parent
    assert [each.name for each in folder.iterdir()] == [POINT.file_name(ABOUT)]


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(InputError, match="cannot be written to"):
        PointStore(occupied / "points", print)
