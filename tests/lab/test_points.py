"""Measured points on disk: whole or absent, and never those of other settings."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from infinigen_kv import InputError
from infinigen_kv_lab.points import PointKey, PointStore

HEAD = {"format": 1, "point": {"policies": ("stream", "h2o"), "alpha": 4.25}, "model": "a"}
KEY = PointKey.of("bench", HEAD)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, said: list[str]) -> PointStore:
    return PointStore(tmp_path / "points", said.append)


def test_a_result_comes_back(store: PointStore, said: list[str]) -> None:
    assert store.get(KEY) is None
    values = {"ms": 1.5, "names": ("a", "b"), "hits": math.nan, "by": {0: 1}, "at": Path("x")}
    kept = {"ms": 1.5, "names": ["a", "b"], "hits": None, "by": {"0": 1}, "at": "x"}
    assert store.put(KEY, values) == kept
    assert store.get(KEY) == kept
    assert said == [], "a point that was never measured is nothing to talk about"


def test_points_with_other_settings_are_apart(store: PointStore) -> None:
    store.put(KEY, {"ms": 1})
    for other in (
        PointKey.of("bench", {**HEAD, "model": "b"}),
        PointKey.of("blocks", HEAD),
        PointKey.of("bench", {**HEAD, "batch": 2}),
    ):
        assert other.file_name != KEY.file_name and store.get(other) is None
    assert PointKey.of("bench", dict(reversed(HEAD.items()))).file_name == KEY.file_name


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "damaged"),
        (b'{"result": {"ms"', "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"[1]", "no result"),
        (json.dumps(KEY.head).encode(), "no result"),
        (b'{"ms": 2}', "not what its name stands for"),
        (json.dumps({**KEY.head, "format": 2, "ms": 1}).encode(), "not what its name stands for"),
        (json.dumps({**KEY.head, "ms": 1, "sha256": "0"}).encode(), "its checksum differs"),
    ],
)
def test_a_damaged_file_is_measured_again_and_said_so(
    store: PointStore, said: list[str], content: bytes, reason: str
) -> None:
    store.put(KEY, {"ms": 1})
    path = store.path(KEY)
    path.write_bytes(content)
    assert store.get(KEY) is None
    assert len(said) == 1 and reason in said[0] and "measured again" in said[0]
    assert str(path) in said[0]
    store.put(KEY, {"ms": 3})
    assert store.get(KEY) == {"ms": 3}


def test_a_changed_figure_is_noticed(store: PointStore, said: list[str]) -> None:
    store.put(KEY, {"ms": 1.5})
    path = store.path(KEY)
    path.write_text(path.read_text().replace("1.5", "1.25"))
    assert store.get(KEY) is None and "checksum" in said[0]


def test_files_of_versions_without_a_checksum_are_read(store: PointStore, said: list[str]) -> None:
    store.path(KEY).write_text(json.dumps({**KEY.head, "result": {"ms": 2}}))
    assert store.get(KEY) == {"result": {"ms": 2}} and said == []


def test_a_write_that_fails_leaves_the_old_file(
    store: PointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(KEY, {"ms": 1})

    def failing(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", failing)
        with pytest.raises(KeyboardInterrupt):
            store.put(KEY, {"ms": 2})
    assert store.get(KEY) == {"ms": 1}
    assert [each.name for each in store.path(KEY).parent.iterdir()] == [KEY.file_name]


def test_a_store_that_reuses_nothing_finds_what_it_put_itself(store: PointStore) -> None:
    store.put(KEY, {"ms": 1})
    fresh = PointStore(store.path(KEY).parent, print, reuse=False)
    assert fresh.get(KEY) is None
    fresh.put(KEY, {"ms": 2})
    assert fresh.get(KEY) == {"ms": 2} == store.get(KEY)


def test_without_a_folder_points_are_kept_in_memory() -> None:
    store = PointStore(None)
    assert store.get(KEY) is None
    values = {"samples": [1]}
    store.put(KEY, values)
    values["samples"].append(2)
    assert store.get(KEY) == {"samples": [1]}
    assert PointStore(None).get(KEY) is None


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(InputError, match="cannot be written to"):
        PointStore(occupied / "points", print)
