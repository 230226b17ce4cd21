"""Helpers of the command line's tests: a tiny model on disk, and what a run must look like."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import Result

import tiny

CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
TEXT = "".join(CHARACTERS[(i * i + i // 7) % len(CHARACTERS)] for i in range(1500))
CHAT_TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"

Run = Callable[..., Result]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {"<pad>": 0, "<s>": 1, "<unk>": 2}
    vocabulary |= {each: place for place, each in enumerate(CHARACTERS, len(vocabulary))}
    assert len(vocabulary) <= tiny.VOCABULARY
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def refusal(result: Result) -> str:
    """The reason of a run that must have ended with bad input: one line, and nothing on stdout."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    # before it only what a user without a terminal sees of the progress
    *progress, reason = result.stderr.splitlines()
    assert all(line.endswith("...") for line in progress), result.stderr
    assert reason.startswith("infinigen-kv")
    return reason


def last_json(result: Result) -> dict[str, Any]:
    """The object on the last line of stdout, read strictly."""
    assert result.exit_code == 0, result.output

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    found = json.loads(result.stdout.splitlines()[-1], parse_constant=refuse)
    assert isinstance(found, dict)
    return found
