"""Conversion with a stand-in for the converter: what interruptions and rivals leave behind."""

import importlib.util
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infinigen_kv.errors import InputError
from infinigen_kv.files import CACHE_VARIABLE
from infinigen_kv.models import gguf as conversion
from infinigen_kv.models.gguf import MANIFEST, convert_gguf, converted_folder
from waiting import PATIENCE


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File that starts as a GGUF file does, and an empty cache folder."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF one")
    return path


def fake_convert(gguf: Path, folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())


def refuse_convert(gguf: Path, folder: Path) -> None:
    raise AssertionError("converted again")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_converts_once_and_reuses(gguf: Path) -> None:
    folder = converted_folder(gguf, convert=fake_convert)
    assert (folder / "model.safetensors").read_bytes() == b"GGUF one"
    assert converted_folder(gguf, convert=refuse_convert) == folder
    assert names(folder.parent) == [folder.name]


def test_the_folder_belongs_to_name_and_content(gguf: Path, tmp_path: Path) -> None:
    first = converted_folder(gguf, convert=fake_convert)
    elsewhere = tmp_path / "other" / "tiny.gguf"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(gguf.read_bytes())
    assert converted_folder(elsewhere, convert=refuse_convert) == first
    gguf.write_bytes(b"GGUF two")
    second = converted_folder(gguf, convert=fake_convert)
    assert second != first
    assert (second / "model.safetensors").read_bytes() == b"GGUF two"


def test_another_format_converts_again(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = converted_folder(gguf, convert=fake_convert)
    monkeypatch.setattr(conversion, "FORMAT", conversion.FORMAT + 1)
    assert converted_folder(gguf, convert=fake_convert) != first


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), InputError("damaged"), MemoryError()])
def test_an_interrupted_conversion_leaves_nothing(gguf: Path, fault: BaseException) -> None:
    def interrupted(source: Path, folder: Path) -> None:
        fake_convert(source, folder)
        raise fault

    with pytest.raises(type(fault)):
        converted_folder(gguf, convert=interrupted)
    models = gguf.parent / "cache" / "models"
    assert names(models) == []
    converted_folder(gguf, convert=fake_convert)
    assert len(names(models)) == 1


def convert_and_hang(gguf: Path, half_way: Any) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        half_way.set()
        time.sleep(PATIENCE)

    converted_folder(gguf, convert=convert)


def convert_slowly(gguf: Path, start: Any) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder.parent.parent / f"converted-{folder.name}").write_text("")
        fake_convert(gguf, folder)
        time.sleep(0.5)  # long enough for the other one to come, as a rule

    start.wait(PATIENCE)
    converted_folder(gguf, convert=convert)


def test_a_killed_process_leaves_nothing_that_is_used(gguf: Path) -> None:
    models = gguf.parent / "cache" / "models"
    context = multiprocessing.get_context("spawn")
    half_way = context.Event()
    process = context.Process(target=convert_and_hang, args=(gguf, half_way))
    process.start()
    assert half_way.wait(PATIENCE)
    process.kill()
    process.join()
    assert len(names(models)) == 1  # the temporary folder

    folder = converted_folder(gguf, convert=fake_convert)
    assert names(models) == [folder.name]
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        MANIFEST,
        "model.safetensors",
    ]


def test_two_processes_at_once_convert_once(gguf: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)
    processes = [context.Process(target=convert_slowly, args=(gguf, start)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list((gguf.parent / "cache").glob("converted-*"))) == 1
    converted_folder(gguf, convert=refuse_convert)


def shorten(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"GG")


def remove(folder: Path) -> None:
    (folder / "config.json").unlink()


def break_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("[")


def empty_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("[]")


@pytest.mark.parametrize("damage", [shorten, remove, break_manifest, empty_manifest])
def test_a_damaged_folder_is_replaced(gguf: Path, damage: Callable[[Path], None]) -> None:
    folder = converted_folder(gguf, convert=fake_convert)
    damage(folder)
    assert converted_folder(gguf, convert=fake_convert) == folder
    assert (folder / "model.safetensors").read_bytes() == b"GGUF one"
    assert names(folder.parent) == [folder.name]
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["files"] == {"config.json": 2, "model.safetensors": 8}


def test_a_full_disk_is_one_line(gguf: Path) -> None:
    def full(source: Path, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match=f"No space left.*set {CACHE_VARIABLE}") as caught:
        converted_folder(gguf, convert=full)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"GG", b"\x80\x04 a pickle"])
def test_a_file_that_is_no_gguf(gguf: Path, content: bytes) -> None:
    gguf.write_bytes(content)
    with pytest.raises(InputError, match="not a GGUF file"):
        converted_folder(gguf, convert=refuse_convert)


@pytest.mark.parametrize("content", [b"GGUF", b"GGUF" + bytes(200), b"GGUF\x03" + bytes(3)])
def test_a_damaged_gguf_is_one_line(gguf: Path, content: bytes) -> None:
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    gguf.write_bytes(content)
    with pytest.raises(InputError, match=r"cannot be converted .* may be damaged") as caught:
        converted_folder(gguf)
    assert "\n" not in str(caught.value)
    assert names(gguf.parent / "cache" / "models") == []


def test_missing_packages_are_named(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs gguf and accelerate: .*'infinigen-kv\[gguf\]'"):
        convert_gguf(gguf, gguf.parent)


def test_a_release_that_misreads_tokenizers_is_refused(
    gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "MIN_TRANSFORMERS", (99, 1))
    with pytest.raises(InputError, match=r"needs transformers>=99\.1: "):
        convert_gguf(gguf, gguf.parent)
