"""``--prompt-chunk`` of every subcommand that reads a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import TEXT, Run, last_json, refusal
from infinigen_kv import InputError
from infinigen_kv.cli.options import DEFAULT_CHUNK, parse_prompt_chunk
from infinigen_kv.config import PROMPT_CHUNK


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (DEFAULT_CHUNK, PROMPT_CHUNK),
        ("1", 1),
        (" 512 ", 512),
        ("none", None),
        ("0", None),
        ("00", None),
    ],
)
def test_numbers_and_none(text: str, expected: int | None) -> None:
    assert parse_prompt_chunk(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "1.5", "many", "1e3", "²", "٣", "9" * 5000])
def test_others_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--prompt-chunk .*2048.*none"):
        parse_prompt_chunk(text)


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "smollm2", "--prompt", "x"),
        ("bench", "smollm2"),
        ("fidelity", "smollm2", "--text", "docs", "--prompt-tokens", 9, "--decode-tokens", 9),
        ("demo",),
    ],
)
def test_every_command_names_a_bad_one_before_it_loads_a_model(
    run: Run, words: tuple[object, ...]
) -> None:
    assert "--prompt-chunk 'all'" in refusal(run(*words, "--prompt-chunk", "all"))


def test_pieces_change_no_text(run: Run, model_folder: Path, artefact: Path) -> None:
    found = []
    for chunk in ("64", "none"):
        result = run(
            *("generate", model_folder, "--prompt", TEXT[:300], "--calibration", artefact),
            *("--max-new-tokens", 8, "--max-fetch", 0.25, "--prompt-chunk", chunk, "--json"),
        )
        found.append(last_json(result))
    assert [each["prompt_chunk"] for each in found] == [64, None]
    assert found[0]["text"] == found[1]["text"]
    assert found[0]["fetched_share"] == found[1]["fetched_share"]


def test_bench_and_fidelity_say_what_they_used(
    run: Run, model_folder: Path, artefact: Path, text_file: Path
) -> None:
    common: tuple[object, ...] = (
        *(model_folder, "--text", text_file, "--calibration", artefact, "--json"),
        *("--prompt-tokens", 100, "--decode-tokens", 4, "--prompt-chunk", 32),
    )
    for words in (("bench", *common, "--policies", "infinigen"), ("fidelity", *common)):
        assert last_json(run(*words))["prompt_chunk"] == 32
