"""Points on disk: whole or absent, and never those of other settings."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest

from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.store import SampleStore, sample_key

SETTINGS = {"alpha": 4.0, "home": Path("x"), "lengths": (1, 2)}
KEY = sample_key("copa", "infinigen", SETTINGS)
SAMPLES = [{"loss": [1.5, None], "seconds": 0.25}]


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "new")
    assert store.samples(KEY) == []
    store.keep(KEY, SAMPLES)
    assert SampleStore(tmp_path / "new").samples(KEY) == SAMPLES
    held = json.loads((tmp_path / "new" / KEY.file_name).read_text("utf-8"))
    assert held["finished"] is False and held["result"] is None
    store.keep(KEY, SAMPLES, {"ppl": 3.0, "low": math.nan})
    held = json.loads((tmp_path / "new" / KEY.file_name).read_text("utf-8"))
    assert held["finished"] is True and held["result"] == {"ppl": 3.0, "low": None}
    assert held["settings"] == {"alpha": 4.0, "home": "x", "lengths": [1, 2]}
    assert [path.name for path in (tmp_path / "new").iterdir()] == [KEY.file_name]


def test_other_settings_are_other_points(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    store.keep(KEY, SAMPLES)
    for other in (
        sample_key("copa", "ideal", SETTINGS),
        sample_key("rte", "infinigen", SETTINGS),
        sample_key("copa", "infinigen", {**SETTINGS, "alpha": 4.5}),
    ):
        assert store.samples(other) == []


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"samples": 3}', '{"samples": [1]}', '{"samples": [{}], "format": 0}'],
)
def test_a_damaged_file_counts_as_absent(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / KEY.file_name).write_text(content, encoding="utf-8")
    store = SampleStore(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert store.samples(KEY) == []
    assert "measured again" in caplog.text
    store.keep(KEY, SAMPLES)
    assert store.samples(KEY) == SAMPLES


def test_a_cut_file_counts_as_absent(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    store.keep(KEY, SAMPLES)
    path = tmp_path / KEY.file_name
    path.write_bytes(path.read_bytes()[:-10])
    assert store.samples(KEY) == []


def test_a_changed_figure_is_noticed(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    store.keep(KEY, SAMPLES, {"ppl": 3.0})
    path = tmp_path / KEY.file_name
    path.write_text(path.read_text("utf-8").replace("1.5", "1.25"), encoding="utf-8")
    assert store.samples(KEY) == []


def test_names_with_odd_characters_make_files(tmp_path: Path) -> None:
    key = sample_key("lm-eval:a/../b", "h2o", {})
    SampleStore(tmp_path).keep(key, SAMPLES)
    assert (tmp_path / key.file_name).is_file()


def test_without_a_folder_points_are_kept_in_memory() -> None:
    store = SampleStore(None)
    assert store.samples(KEY) == []
    samples = list(SAMPLES)
    store.keep(KEY, samples)
    samples.append({"loss": []})
    assert store.samples(KEY) == SAMPLES
    assert SampleStore(None).samples(KEY) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot be written to"):
        SampleStore(tmp_path / "file" / "folder")
