"""Passkey retrieval: five digits in a long text of no interest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.data import Record, data_file, digest, read_jsonl, read_utf8
from infinigen_kv_lab.evals.reading import Reader
from infinigen_kv_lab.evals.retrieval import Retrieval, ask, summarise_answers, tokens_of
from infinigen_kv_lab.evals.task import Inputs, Sample, Task, fetched_of

RECORDS = "passkey/passkey_generated.jsonl"
TEMPLATE = "passkey/prompt_template.txt"
FIELDS = ("context", "input", "answer", "target_len", "depth")
NUMBERS = MappingProxyType({"target_len": (int,), "depth": (int, float)})
"""Fields that hold no text, and their types."""
CONTEXT, QUESTION = "{context}", "{input}"


class PasskeyTask(Task):
    """Prompts of the passkey file that fit the model, shortest first.

    The prompt is the template with context and question. With ``asked_later`` the part from the
    question on is read in decode steps, after the cache was built, as in a later turn.

    Parameters
    ----------
    prompts
        Pairs of a record and its ``(prompt, question, answer)`` token ids.
    too_long
        Records left out.
    """

    name = "passkey"

    def __init__(
        self,
        prompts: Sequence[tuple[dict[str, Any], tuple[Tensor, Tensor, Tensor]]],
        *,
        source: str,
        asked_later: bool,
        too_long: int,
    ) -> None:
        self._prompts = prompts
        self._source = source
        self._asked_later = asked_later
        self._too_long = too_long

    @property
    def settings(self) -> dict[str, Any]:
        return {"text": self._source, "asked_later": self._asked_later}

    def __len__(self) -> int:
        return len(self._prompts)

    def measure(self, reader: Reader, index: int, shared: Any) -> Sample:
        record, (prompt, question, answer) = self._prompts[index]
        if not self._asked_later:
            prompt, question = torch.cat([prompt, question]), question[:0]
        reading = reader.start(prompt, room=len(question) + len(answer))
        (found,) = ask(reading, [(question, answer)])
        return {
            "length": record["target_len"],
            "tokens": len(prompt),
            "answers": [{"depth": record["depth"], **found}],
            **fetched_of(reader),
        }

    def summarise(
        self, samples: Sequence[Sample], full: Sequence[Sample] | None = None
    ) -> Retrieval:
        return summarise_answers(samples, full, too_long=self._too_long)


def passkey(name: str, inputs: Inputs) -> PasskeyTask:
    """The records of the data folder."""
    what = "passkey prompts as JSON Lines with context, input, answer, target_len, depth"
    path = data_file(inputs.data, RECORDS, task=name, what=what)
    what = "their template, with {context} and {input}"
    template_path = data_file(inputs.data, TEMPLATE, task=name, what=what)
    template = read_utf8(template_path)
    _check_template(template, template_path)
    before, _, rest = template.partition(CONTEXT)
    after_context, _, after_question = rest.partition(QUESTION)
    prompts, too_long = [], 0
    records = read_jsonl(path, FIELDS, _checked)
    for record in records:
        question = f"{after_context}{record['input']}{after_question.rstrip()}"
        pieces = (
            tokens_of(inputs.tokenizer, f"{before}{record['context']}", first=True),
            tokens_of(inputs.tokenizer, question),
            tokens_of(inputs.tokenizer, f" {record['answer']}"),
        )
        limit = inputs.max_positions
        if limit is not None and sum(map(len, pieces)) > limit:
            too_long += 1
        else:
            prompts.append((record, pieces))
    if not prompts:
        raise InputError(f"{path}: no prompt fits the model's {inputs.max_positions} positions")
    prompts.sort(key=lambda each: len(each[1][0]))
    return PasskeyTask(
        prompts,
        source=digest(template, *(str(record) for record in records)),
        asked_later=inputs.options.asked_later,
        too_long=too_long,
    )


def _checked(record: Record) -> Record:
    """The record, or `ValueError` where a field is of another kind."""
    for name in FIELDS:
        value = record[name]
        if isinstance(value, bool) or not isinstance(value, NUMBERS.get(name, (str,))):
            wanted = "a number" if name in NUMBERS else "a text"
            raise ValueError(f"{name}={value!r} is not valid: it must be {wanted}")
        if value == "":
            raise ValueError(f"{name} is empty: it must be a text")
    return record


def _check_template(template: str, path: Path) -> None:
    context, question = template.find(CONTEXT), template.find(QUESTION)
    if context < 0 or question < context:
        raise InputError(f"{path}: the template must hold {CONTEXT} and after it {QUESTION}")
