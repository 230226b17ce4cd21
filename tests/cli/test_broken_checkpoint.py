"""Checkpoints whose files are not what they should be: one line that says so, exit code 2."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import Run, refusal

Edit = Callable[[dict[str, Any]], object]


def variant(folder: Path, target: Path, file: str, edit: Edit | str) -> Path:
    """A copy in which one file is another."""
    shutil.copytree(folder, target)
    if isinstance(edit, str):
        (target / file).write_text(edit)
    else:
        values = json.loads((target / file).read_text())
        edit(values)
        (target / file).write_text(json.dumps(values))
    return target


def changed(**values: Any) -> Edit:
    return lambda config: config.update(values)


CASES: dict[str, tuple[str, Edit | str, str]] = {
    "list": ("config.json", "[1, 2]", "config.json holds a list"),
    "no JSON": ("config.json", "{", "config.json is not valid JSON"),
    "heads": ("config.json", changed(num_attention_heads=3), "not a multiple"),
    "KV heads": ("config.json", changed(num_key_value_heads=3), r"k_proj.weight has shape"),
    "negative layers": ("config.json", changed(num_hidden_layers=-2), "hold -2 decoder layers"),
    "textual layers": ("config.json", changed(num_hidden_layers="four"), "expected int, got str"),
    "no layers": ("config.json", changed(num_hidden_layers=0), "hold 0 decoder layers"),
    "rotary type": (
        "config.json",
        changed(rope_parameters={"rope_type": "nonsense", "rope_theta": 1e4}),
        "KeyError: 'nonsense'",
    ),
    "shapes": ("config.json", changed(intermediate_size=77), r"asks for \(32, 77\)"),
    "generation list": ("generation_config.json", "[]", "generation_config.json holds a list"),
    "generation no JSON": ("generation_config.json", "{", "generation_config.json is not valid"),
    "tokenizer": ("tokenizer.json", "{", "tokenizer.json is not valid JSON"),
    "tokenizer list": ("tokenizer_config.json", "[]", "tokenizer_config.json holds a list"),
}


@pytest.mark.filterwarnings("ignore:.*weights of the checkpoint are of no use")
@pytest.mark.parametrize("case", CASES)
def test_generate_refuses(run: Run, model_folder: Path, tmp_path: Path, case: str) -> None:
    file, edit, reason = CASES[case]
    broken = variant(model_folder, tmp_path / "broken", file, edit)
    assert re.search(reason, refusal(run("generate", broken, "--prompt", "hello")))


@pytest.mark.parametrize("case", ["list", "heads", "negative layers", "textual layers"])
def test_plan_refuses(run: Run, model_folder: Path, tmp_path: Path, case: str) -> None:
    file, edit, _ = CASES[case]
    broken = variant(model_folder, tmp_path / "broken", file, edit)
    refusal(run("plan", broken, "--context", 100))


def test_heads_that_cannot_share(run: Run, model_folder: Path, tmp_path: Path) -> None:
    """Without weights only the counts tell."""
    edit = changed(num_key_value_heads=3)
    broken = variant(model_folder, tmp_path / "broken", "config.json", edit)
    line = refusal(run("plan", broken, "--context", 100))
    assert "4 query heads cannot share 3 KV heads evenly" in line


def test_tokens_that_the_model_does_not_know(run: Run, model_folder: Path, tmp_path: Path) -> None:
    def rename(tokenizer: dict[str, Any]) -> None:
        tokenizer["model"]["vocab"]["h"] = 5000

    broken = variant(model_folder, tmp_path / "broken", "tokenizer.json", rename)
    line = refusal(run("generate", broken, "--prompt", "oh"))
    assert "token ids from" in line and "to 5000 are not valid: the model knows 0 to 127" in line


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--device", "mps"), "device 'mps': this machine has none"),
        (("--link", "emulated:1,1e30"), "--link 'emulated:1,1e30' is not valid"),
        (("--link", "emulated:1e-300"), "--link 'emulated:1e-300' is not valid"),
        (("--home-dir", "/"), "--home-dir '/' is not valid with home='ram'"),
        (("--evict", "lru"), "--evict 'lru' is not valid without --capacity"),
    ],
)
def test_options_that_cannot_be(
    run: Run, model_folder: Path, words: tuple[str, ...], reason: str
) -> None:
    assert reason in refusal(run("generate", model_folder, "--prompt", "hello", *words))


def test_more_new_tokens_than_the_context(run: Run, model_folder: Path) -> None:
    line = refusal(run("plan", model_folder, "--context", 100, "--max-new-tokens", 100))
    assert "--max-new-tokens 100 is not valid: it must be less than --context 100" in line


def test_an_output_without_a_name(run: Run, model_folder: Path, text_file: Path) -> None:
    line = refusal(run("calibrate", model_folder, "--text", text_file, "--output", ""))
    assert "choose another output folder" in line
