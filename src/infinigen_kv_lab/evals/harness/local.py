"""The paper's five few-shot tasks over JSON Lines files, with the prompts of the harness.

The prompt forms are those of lm-eval's own tasks of the same names, which read from the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.data import data_file, read_jsonl

if TYPE_CHECKING:
    from datasets import Dataset

Document = dict[str, Any]
TASKS = Path(__file__).parent / "tasks"
"""Descriptions of the same tasks for the harness's own command line, by the names NAME_local."""

CONNECTORS = MappingProxyType({"cause": "because", "effect": "therefore"})


@dataclass(frozen=True, slots=True)
class Form:
    """How one task makes a question of a document.

    ``text`` is the question, ``choices`` are the answers to compare, ``target`` is the right one.
    WinoGrande turns this round: its choices are what comes before, its target is the one
    continuation of them all, and its text the number of the right choice.
    """

    fields: tuple[str, ...]
    text: Callable[[Document], str | int]
    choices: Callable[[Document], list[str]]
    target: Callable[[Document], str | int]
    metrics: tuple[str, ...] = ("acc",)

    def document(self, record: Document) -> Document:
        """The fields of a record that the task uses.

        Raises
        ------
        ValueError
            They make no question.
        """
        document = {name: record[name] for name in self.fields}
        try:
            choices = self.choices(document)
            made = self.text(document), self.target(document)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"its values make no question ({type(error).__name__}: {error})"
            ) from error
        numbers = [each for each in made if isinstance(each, int)]
        if not all(0 <= number < len(choices) for number in numbers):
            raise ValueError(
                f"the right answer is number {numbers[0]}, but there are {len(choices)}"
            )
        return document


def _copa_choice(text: str) -> str:
    return f" {text[0].lower()}{text[1:]}"


def _copa_choices(document: Document) -> list[str]:
    return [_copa_choice(document["choice1"]), _copa_choice(document["choice2"])]


def _winogrande_choices(document: Document) -> list[str]:
    before = document["sentence"][: document["sentence"].index("_")]
    return [before + document["option1"], before + document["option2"]]


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "copa": Form(
            fields=("premise", "choice1", "choice2", "question", "label"),
            text=lambda doc: f"{doc['premise'].strip()[:-1]} {CONNECTORS[doc['question']]}",
            choices=_copa_choices,
            target=lambda doc: _copa_choices(doc)[doc["label"]],
        ),
        "openbookqa": Form(
            fields=("question_stem", "choices", "answerKey"),
            text=lambda doc: str(doc["question_stem"]),
            choices=lambda doc: list(doc["choices"]["text"]),
            target=lambda doc: int(doc["choices"]["label"].index(doc["answerKey"].lstrip())),
            metrics=("acc", "acc_norm"),
        ),
        "winogrande": Form(
            fields=("sentence", "option1", "option2", "answer"),
            text=lambda doc: ("1", "2").index(doc["answer"]),
            choices=_winogrande_choices,
            target=lambda doc: str(doc["sentence"][doc["sentence"].index("_") + 1 :].strip()),
        ),
        "piqa": Form(
            fields=("goal", "sol1", "sol2", "label"),
            text=lambda doc: f"Question: {doc['goal']}\nAnswer:",
            choices=lambda doc: [doc["sol1"], doc["sol2"]],
            target=lambda doc: int(doc["label"]),
            metrics=("acc", "acc_norm"),
        ),
        "rte": Form(
            fields=("sentence1", "sentence2", "label"),
            text=lambda doc: (
                f"{doc['sentence1']}\nQuestion: {doc['sentence2']} True or False?\nAnswer:"
            ),
            choices=lambda doc: ["True", "False"],
            target=lambda doc: int(doc["label"]),
        ),
    }
)


def local_documents(name: str, folder: Path) -> dict[str, list[Document]]:
    """Documents of ``fewshot/NAME.validation.jsonl`` and, for shots, ``fewshot/NAME.train*.jsonl``.

    Raises
    ------
    InputError
        A file is missing, or a line makes no question; says which.
    """
    what = f"the validation split of {name}, one JSON object a line with the hub's field names"
    validation = data_file(folder, f"fewshot/{name}.validation.jsonl", task=name, what=what)
    pools = sorted((folder / "fewshot").glob(f"{name}.train*.jsonl"))
    if not pools:
        raise InputError(
            f"task {name!r}: {folder / 'fewshot' / f'{name}.train.jsonl'} is missing: fetch a part "
            f"of the train split of {name}, for the shots, and put it there"
        )
    form = FORMS[name]
    return {
        "train": [each for pool in pools for each in read_jsonl(pool, form.fields, form.document)],
        "validation": read_jsonl(validation, form.fields, form.document),
    }


def local_config(name: str, documents: dict[str, list[Document]]) -> dict[str, Any]:
    """The harness's description of a task over these documents."""
    from datasets import Dataset

    form = FORMS[name]
    splits = {split: Dataset.from_list(each) for split, each in documents.items()}

    def load(**unused: Any) -> dict[str, Dataset]:
        return splits

    return {
        "task": name,
        "custom_dataset": load,
        "output_type": "multiple_choice",
        "training_split": "train",
        "validation_split": "validation",
        "doc_to_text": form.text,
        "doc_to_choice": form.choices,
        "doc_to_target": form.target,
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True}
            for metric in form.metrics
        ],
        "metadata": {"version": 1.0},
    }


def load(name: str, data: str | None = None, **unused: Any) -> dict[str, Dataset]:
    """For the harness's own command line (`TASKS`): documents with text, choices and target.

    Parameters
    ----------
    name
        Of the task, from its description.
    data
        The data folder, from ``--metadata``.

    Raises
    ------
    InputError
        As `local_documents`, or if there is no folder.
    """
    from datasets import Dataset

    if data is None:
        raise InputError(
            f"task {name!r} needs its data: put it into a folder as fewshot/{name}.*.jsonl, and "
            """name the folder with --metadata '{"data": "DIR"}'"""
        )
    form = FORMS[name]
    return {
        split: Dataset.from_list(
            [
                {
                    "text": form.text(document),
                    "choices": form.choices(document),
                    "target": form.target(document),
                }
                for document in documents
            ]
        )
        for split, documents in local_documents(name, Path(data)).items()
    }
