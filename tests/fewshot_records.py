"""Records of the five few-shot tasks, made up in the fields of the hub's data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COPA = [
    {"premise": "The man fell.", "choice1": "He slipped.", "choice2": "It rained.",
     "question": "cause", "idx": 0, "label": 0},
    {"premise": "It rained. ", "choice1": "The sun rose.", "choice2": "I got wet.",
     "question": "effect", "idx": 1, "label": 1},
]  # fmt: skip
OPENBOOKQA = [
    {"id": "1", "question_stem": "Fog is likely around", "answerKey": " A",
     "choices": {"text": ["a marsh", "a desert"], "label": ["A", "B"]}},
    {"id": "2", "question_stem": "Predators eat", "answerKey": "C",
     "choices": {"text": ["grass", "air", "rabbits"], "label": ["A", "B", "C"]}},
]  # fmt: skip
WINOGRANDE = [
    {"sentence": "Ann met Eve so _ smiled.", "option1": "Ann", "option2": "Eve", "answer": "2"},
    {"sentence": "The lid and the box: the _ was open. ", "option1": "lid", "option2": "box",
     "answer": "1"},
]  # fmt: skip
PIQA = [
    {"goal": "Clean a shoe", "sol1": "Brush it", "sol2": "Eat it", "label": 0},
    {"goal": "how do you shake", "sol1": "stir it.", "sol2": "move it.", "label": 1},
]
RTE = [
    {"sentence1": "A is B.", "sentence2": "B is A.", "label": 0, "idx": 0},
    {"sentence1": "C is D.", "sentence2": "D is E.", "label": 1, "idx": 1},
]
RECORDS: dict[str, list[dict[str, Any]]] = {
    "copa": COPA, "openbookqa": OPENBOOKQA, "winogrande": WINOGRANDE, "piqa": PIQA, "rte": RTE,
}  # fmt: skip


def folder(path: Path, name: str, records: list[Any], *, train: bool = True) -> Path:
    (path / "fewshot").mkdir(exist_ok=True)
    lines = "".join(f"{json.dumps(each) if isinstance(each, dict) else each}\n" for each in records)
    (path / "fewshot" / f"{name}.validation.jsonl").write_text(lines, encoding="utf-8")
    if train:
        lines = "".join(json.dumps(each) + "\n" for each in RECORDS[name])
        (path / "fewshot" / f"{name}.train100.jsonl").write_text(lines, encoding="utf-8")
    return path
