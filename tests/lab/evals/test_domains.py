"""Texts of other domains: which files, windows by turns, and what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import tokenizer
from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.perplexity import PerplexityTask
from infinigen_kv_lab.evals.registry import make_task
from infinigen_kv_lab.evals.task import Inputs, TaskOptions


def make(name: str, data: Path | None, window: int = 10) -> PerplexityTask:
    options = TaskOptions(window=window, prompt_tokens=window // 2)
    made = make_task(name, Inputs(tokenizer(), 512, data, options))
    assert isinstance(made, PerplexityTask)
    return made


def folder(path: Path, name: str, **files: str) -> Path:
    (path / name).mkdir()
    for stem, text in files.items():
        (path / name / stem.replace("_", ".")).write_text(text, encoding="utf-8")
    return path


def test_windows_of_the_files_by_turns(tmp_path: Path) -> None:
    data = folder(
        tmp_path,
        "code",
        b_py="b" * 25,
        a_cpp="1" * 10 + "2" * 10 + "3" * 10,
        c_rs="short",
        SOURCE_txt="s" * 50,
        d_md="d" * 50,
    )
    made = make("code", data)
    windows = [tokenizer().decode(each) for each in made._windows]
    assert windows == ["1" * 10, "b" * 10, "2" * 10, "b" * 10, "3" * 10]
    assert (len(made), made.settings["window"]) == (5, 10)


def test_german_texts(tmp_path: Path) -> None:
    data = folder(tmp_path, "german", x_txt="Als Gregor Samsa", SOURCE_txt="s" * 50)
    assert [tokenizer().decode(each) for each in make("german", data)._windows] == ["Als Gregor"]


def test_other_texts_are_other_settings(tmp_path: Path) -> None:
    first = make("code", folder(tmp_path, "code", a_py="a" * 20)).settings
    (tmp_path / "code" / "b.py").write_text("b" * 20, encoding="utf-8")
    assert make("code", tmp_path).settings != first


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"long source files .*as code/\*\.py, .*--data DIR"):
        make("code", None)
    with pytest.raises(InputError, match=r"german holds no file that ends in \.txt: fetch long Ge"):
        make("german", tmp_path)
    data = folder(tmp_path, "german", SOURCE_txt="only this")
    with pytest.raises(InputError, match="holds no file"):
        make("german", data)


def test_texts_shorter_than_a_window(tmp_path: Path) -> None:
    data = folder(tmp_path, "code", a_py="a" * 20, b_c="b" * 30)
    with pytest.raises(InputError, match=r"longest of its 2 files has 30 tokens.* no whole window"):
        make("code", data, window=31)
