"""Questions about a text: whether a policy still finds what is in it, by depth and length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from infinigen_kv_lab.evals.reading import Reading
from infinigen_kv_lab.evals.task import Costs, Result, Sample, costs, fetched, percent
from infinigen_kv_lab.kit.intervals import Estimate, difference, share

DEPTH_STEP = 0.25  # of the depths that answers are counted by


@dataclass(frozen=True, slots=True)
class Cell:
    """Answers of one context length (tokens, nominal) and depth (0: the start of the context)."""

    length: int
    depth: float
    asked: int
    right: int


@dataclass(frozen=True, slots=True)
class Retrieval(Result):
    """How many answers were right, with an interval by bootstrap over contexts.

    An answer is right where every one of its tokens is the most likely one after those before it:
    just then greedy decoding would give it. ``log_probability`` is the answers' mean. ``whole`` is
    the share of contexts without a wrong answer. ``difference`` is accuracy less that of the full
    cache on the same contexts. ``too_long`` contexts did not fit the model and are not counted.
    ``by_turn`` are the shares of right answers to the first, second, ... question of a context, all
    asked of one cache that was built before the first; empty where each context has one question.
    """

    asked: int
    right: int
    accuracy: Estimate
    whole: float
    difference: Estimate | None
    log_probability: float
    fetched_share: float
    fetched_share_all_layers: float
    costs: Costs
    too_long: int
    cells: tuple[Cell, ...]
    by_field: dict[str, float]
    by_turn: tuple[float, ...]

    def headline(self) -> dict[str, str]:
        return {
            "right": f"{self.right} of {self.asked}",
            "accuracy": str(self.accuracy),
            "less full": "-" if self.difference is None else str(self.difference),
            "log-probability": f"{self.log_probability:.3f}",
            "fetched": percent(self.fetched_share),
            **self.costs.headline(),
            **self._turns(),
        }

    def _turns(self) -> dict[str, str]:
        if not self.by_turn:
            return {}
        first, last = percent(self.by_turn[0]), percent(self.by_turn[-1])
        return {"first, last turn": f"{first}, {last}"}


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str, *, first: bool = False) -> Tensor:
    """Token ids ``(n,)`` of a piece of text; special tokens only where it is the ``first``."""
    ids = tokenizer(text, add_special_tokens=first, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def ask(reading: Reading, turns: Sequence[tuple[Tensor, Tensor]]) -> list[dict[str, Any]]:
    """Read questions and their true answers as decode steps, and say which were expected.

    Parameters
    ----------
    turns
        Pairs of a question ``(n,)`` and an answer ``(m,)``, token ids, m at least 1. A first
        question may be empty, where the prompt has asked already.
    """
    tokens = torch.cat([piece for turn in turns for piece in turn]).to(reading.last.device)
    before = reading.last[None]
    logits = torch.cat([before, reading.feed(tokens)[:-1]])  # row i predicts token i
    found, at = [], 0
    for question, answer in turns:
        place = slice(at + len(question), at + len(question) + len(answer))
        scores, true = logits[place].log_softmax(-1), tokens[place]
        expected = scores.argmax(-1)
        found.append(
            {
                "right": bool((expected == true).all()),
                "log_probability": scores.gather(1, true[:, None]).double().sum().item(),
                "expected": expected.tolist(),
            }
        )
        at = place.stop
    return found


def summarise_answers(
    samples: Sequence[Sample], full: Sequence[Sample] | None, *, too_long: int
) -> Retrieval:
    """Figures of samples that hold a nominal ``length`` and ``answers`` with a ``depth`` each."""
    right = [sum(answer["right"] for answer in each["answers"]) for each in samples]
    asked = [len(each["answers"]) for each in samples]
    apart = None
    if full is not None:
        reference = [sum(answer["right"] for answer in each["answers"]) for each in full]
        apart = difference(right, reference, asked)
    answers = [answer for each in samples for answer in each["answers"]]
    selecting, all_layers = fetched(samples)
    total = sum(answer["log_probability"] for answer in answers)
    return Retrieval(
        asked=sum(asked),
        right=sum(right),
        accuracy=share(right, asked),
        whole=_ratio(sum(a == b for a, b in zip(right, asked, strict=True)), len(samples)),
        difference=apart,
        log_probability=_ratio(total, len(answers)),
        fetched_share=selecting,
        fetched_share_all_layers=all_layers,
        costs=costs(samples),
        too_long=too_long,
        cells=_cells(samples),
        by_field=_by_field(answers),
        by_turn=_by_turn(samples),
    )


def _cells(samples: Sequence[Sample]) -> tuple[Cell, ...]:
    counts: dict[tuple[int, float], list[int]] = {}
    for sample in samples:
        for answer in sample["answers"]:
            depth = round(answer["depth"] / DEPTH_STEP) * DEPTH_STEP
            cell = counts.setdefault((sample["length"], depth), [0, 0])
            cell[0] += 1
            cell[1] += answer["right"]
    return tuple(Cell(*place, *count) for place, count in sorted(counts.items()))


def _by_field(answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    fields = dict.fromkeys(answer["field"] for answer in answers if "field" in answer)
    found = {}
    for name in fields:
        mine = [answer["right"] for answer in answers if answer.get("field") == name]
        found[name] = _ratio(sum(mine), len(mine))
    return found


def _by_turn(samples: Sequence[Sample]) -> tuple[float, ...]:
    turns = max(len(each["answers"]) for each in samples)
    if turns == 1:
        return ()
    by_turn = [
        [each["answers"][turn]["right"] for each in samples if len(each["answers"]) > turn]
        for turn in range(turns)
    ]
    return tuple(_ratio(sum(right), len(right)) for right in by_turn)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
