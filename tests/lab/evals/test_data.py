"""Data files: what is missing and what is wrong is said, with the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.data import data_file, digest, read_jsonl, read_lines, read_utf8


def test_missing_data_says_what_to_fetch_and_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"task 'x' needs a text: .* as a/b\.txt, .*--data DIR"):
        data_file(None, "a/b.txt", task="x", what="a text")
    with pytest.raises(InputError) as caught:
        data_file(tmp_path, "a/b.txt", task="x", what="a text")
    assert str(caught.value) == (
        f"task 'x': {tmp_path / 'a' / 'b.txt'} is missing: fetch a text and put it there"
    )


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("one\u2028more\r\n\ntwo\x0c \n".encode())
    assert read_lines(path) == ["one\u2028more\r", "", "two\x0c "]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"a": 1}\n{"a": \n', "line 2: not JSON"),
        (b'{"a": 1}\n\n[1]\n', "line 3: not a JSON object"),
        (b'{"a": 1}\n{"b": 2}\n', "line 2: no field 'a'; needed: a"),
        (b'{"a": 1}\n{"a": 9}\n', "line 2: nine"),
        (b'{"a": "\xff"}', "not UTF-8 text .byte 7"),
        (b" \n", "the file is empty"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(content)

    def check(record: dict[str, object]) -> dict[str, object]:
        if record["a"] == 9:
            raise ValueError("nine")
        return record

    with pytest.raises(InputError, match=f"records.jsonl.*{reason}"):
        read_jsonl(path, ["a"], check)


def test_good_lines(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"a": 1, "b": 2}\n\n{"a": "x\u2028y"}\n', encoding="utf-8")
    assert read_jsonl(path, ["a"]) == [{"a": 1, "b": 2}, {"a": "x\u2028y"}]


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_utf8(tmp_path)


def test_a_digest_tells_texts_apart_by_their_borders() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("ab") == digest("ab")
