import stat
from pathlib import Path

import platformdirs
import pytest

from infinigen_kv.errors import InputError
from infinigen_kv.files import CACHE_VARIABLE, cache_dir


def test_the_variable_names_the_folder_and_only_the_user_may_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tmp_path / "a" / "b"
    monkeypatch.setenv(CACHE_VARIABLE, str(chosen))
    assert cache_dir() == chosen
    assert stat.S_IMODE(chosen.stat().st_mode) == 0o700
    assert cache_dir() == chosen


def test_a_relative_folder_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, "here")
    assert cache_dir() == tmp_path / "here"


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_it_is_the_platforms(
    value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if value is None:
        monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(CACHE_VARIABLE, value)
    assert cache_dir() == platformdirs.user_cache_path("infinigen-kv", appauthor=False)


def test_a_file_in_its_place_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(InputError, match=f"set {CACHE_VARIABLE} to a folder"):
        cache_dir()
