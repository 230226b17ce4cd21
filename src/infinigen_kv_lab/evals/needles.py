"""Several numbers hidden in one text, asked for one after the other once the cache is built."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.data import data_file, digest, read_utf8
from infinigen_kv_lab.evals.reading import Reader
from infinigen_kv_lab.evals.retrieval import Retrieval, ask, summarise_answers, tokens_of
from infinigen_kv_lab.evals.task import Inputs, Sample, Task, fetched_of

DEFAULT_TEXT = "books/pg1342_pride_and_prejudice.txt"
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PLACES = (
    "Lisbon", "Oslo", "Cairo", "Lima", "Quebec", "Perth", "Dublin", "Kyoto", "Nairobi", "Vienna",
)  # fmt: skip
NEEDLE = " The magic number of {place} is {number}."
QUESTION = "\n\nThe magic number of {place} is"


@dataclass(frozen=True, slots=True)
class Haystack:
    """A context ``(n,)`` with needles, and for each its depth, question and answer."""

    length: int
    context: Tensor
    asked: tuple[tuple[float, Tensor, Tensor], ...]

    @property
    def questions(self) -> int:
        """Tokens of all questions and answers."""
        return sum(len(question) + len(answer) for _, question, answer in self.asked)


class NeedlesTask(Task):
    """Contexts of the given lengths; each is read once, then asked for all of its needles.

    The questions come in random order, each after the true answer to the one before: later turns
    over one cache.
    """

    name = "needles"

    def __init__(self, haystacks: Sequence[Haystack], *, settings: dict[str, Any]) -> None:
        self._haystacks = haystacks
        self._settings = settings

    @property
    def settings(self) -> dict[str, Any]:
        return self._settings

    def __len__(self) -> int:
        return len(self._haystacks)

    def measure(self, reader: Reader, index: int, shared: Any) -> Sample:
        haystack = self._haystacks[index]
        reading = reader.start(haystack.context, room=haystack.questions)
        found = ask(reading, [(question, answer) for _, question, answer in haystack.asked])
        answers = [
            {"depth": depth, **each}
            for (depth, *_), each in zip(haystack.asked, found, strict=True)
        ]
        return {
            "length": haystack.length,
            "tokens": len(haystack.context),
            "answers": answers,
            **fetched_of(reader),
        }

    def summarise(
        self, samples: Sequence[Sample], full: Sequence[Sample] | None = None
    ) -> Retrieval:
        return summarise_answers(samples, full, too_long=0)


def needles(name: str, inputs: Inputs) -> NeedlesTask:
    """Needles in the file of ``text``, or in a book of the data folder.

    Raises
    ------
    InputError
        If the text is too short for one context, or a length exceeds the model's positions.
    """
    options = inputs.options
    path = options.text or data_file(
        inputs.data, DEFAULT_TEXT, task=name, what="a long text (or name one with --text FILE)"
    )
    text = read_utf8(path)
    hay = tokens_of(inputs.tokenizer, text)
    haystacks = []
    for repeat in range(options.repeats):
        for place, length in enumerate(sorted(options.lengths)):
            generator = random.Random(f"{options.seed} {length} {repeat}")
            start = (repeat * len(options.lengths) + place) * max(options.lengths)
            haystacks.append(_haystack(inputs.tokenizer, hay, start, length, generator))
            _check_room(haystacks[-1], inputs.max_positions)
    settings = {
        "text": digest(text),
        "lengths": sorted(options.lengths),
        "seed": options.seed,
    }
    return NeedlesTask(haystacks, settings=settings)


def _haystack(
    tokenizer: PreTrainedTokenizerBase,
    hay: Tensor,
    start: int,
    length: int,
    generator: random.Random,
) -> Haystack:
    """A context of ``length`` tokens from ``start`` on (over and over where the text ends)."""
    places = generator.sample(PLACES, len(DEPTHS))
    numbers = [str(generator.randrange(10_000, 100_000)) for _ in DEPTHS]
    hidden = [
        tokens_of(tokenizer, NEEDLE.format(place=place, number=number))
        for place, number in zip(places, numbers, strict=True)
    ]
    straw = length - sum(map(len, hidden))
    if straw <= 0 or len(hay) < straw:
        raise InputError(
            f"a context of {length} tokens cannot be made from a text of {len(hay)} tokens: choose "
            "another length or a longer text"
        )
    filler = hay.roll(-(start % len(hay)))[:straw]
    edges = [round(depth * straw) for depth in DEPTHS]
    pieces = [filler[: edges[0]]]
    for needle, begin, end in zip(hidden, edges, [*edges[1:], straw], strict=True):
        pieces += [needle, filler[begin:end]]
    asked = [
        (
            depth,
            tokens_of(tokenizer, QUESTION.format(place=place)),
            tokens_of(tokenizer, f" {number}."),
        )
        for depth, place, number in zip(DEPTHS, places, numbers, strict=True)
    ]
    generator.shuffle(asked)
    return Haystack(length, torch.cat(pieces), tuple(asked))


def _check_room(haystack: Haystack, limit: int | None) -> None:
    tokens = len(haystack.context) + haystack.questions
    if limit is not None and tokens > limit:
        raise InputError(
            f"a context of {haystack.length} tokens and its questions make {tokens}, more than "
            f"the model's {limit} positions: choose shorter lengths"
        )
