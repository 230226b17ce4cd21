"""Forms out of a long list: many fields of many entries, copied one after the other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.reading import Reader
from infinigen_kv_lab.evals.retrieval import Retrieval, ask, summarise_answers, tokens_of
from infinigen_kv_lab.evals.task import Inputs, Sample, Task, fetched_of

HEAD = "Stock list of the warehouse.\n"
TURN = "\nCopied from the list above:\n"
FORMS = 6  # entries asked for of each list
KINDS = (
    "brass",
    "wooden",
    "glass",
    "copper",
    "paper",
    "steel",
    "clay",
    "silver",
    "rubber",
    "stone",
)
THINGS = ("lamp", "box", "bowl", "chair", "clock", "mirror", "kettle", "ladder", "brush", "basket")
COLOURS = ("red", "green", "blue", "yellow", "white", "black", "grey", "brown", "purple", "orange")
TOWNS = (
    "Lisbon",
    "Oslo",
    "Cairo",
    "Lima",
    "Quebec",
    "Perth",
    "Dublin",
    "Kyoto",
    "Nairobi",
    "Vienna",
)

Entry = dict[str, str]


@dataclass(frozen=True, slots=True)
class StockList:
    """A context ``(n,)``, and for each form its depth and ``(field, question, answer)``."""

    length: int
    context: Tensor
    forms: tuple[tuple[float, tuple[tuple[str, Tensor, Tensor], ...]], ...]

    @property
    def questions(self) -> int:
        """Tokens of all forms."""
        return sum(
            len(question) + len(answer)
            for _, fields in self.forms
            for _, question, answer in fields
        )


class ExtractionTask(Task):
    """Lists of the given lengths; of each, entries from all depths are filled in field by field.

    Each field's answer is compared before the true one is read. Every value is drawn at random, so
    that it can only come from the list.
    """

    name = "extraction"

    def __init__(self, lists: Sequence[StockList], *, settings: dict[str, Any]) -> None:
        self._lists = lists
        self._settings = settings

    @property
    def settings(self) -> dict[str, Any]:
        return self._settings

    def __len__(self) -> int:
        return len(self._lists)

    def measure(self, reader: Reader, index: int, shared: Any) -> Sample:
        stock = self._lists[index]
        reading = reader.start(stock.context, room=stock.questions)
        found = ask(
            reading,
            [(question, answer) for _, fields in stock.forms for _, question, answer in fields],
        )
        asked = [(depth, field) for depth, fields in stock.forms for field, *_ in fields]
        answers = [
            {"depth": depth, "field": field, **each}
            for (depth, field), each in zip(asked, found, strict=True)
        ]
        return {
            "length": stock.length,
            "tokens": len(stock.context),
            "answers": answers,
            **fetched_of(reader),
        }

    def summarise(
        self, samples: Sequence[Sample], full: Sequence[Sample] | None = None
    ) -> Retrieval:
        return summarise_answers(samples, full, too_long=0)


def extraction(name: str, inputs: Inputs) -> ExtractionTask:
    """Lists made from templates.

    Raises
    ------
    InputError
        If a length exceeds the model's positions.
    """
    options = inputs.options
    lists = []
    for repeat in range(options.repeats):
        for length in sorted(options.lengths):
            generator = random.Random(f"{options.seed} {length} {repeat}")
            stock = _stock_list(inputs.tokenizer, length, generator)
            tokens = len(stock.context) + stock.questions
            if inputs.max_positions is not None and tokens > inputs.max_positions:
                raise InputError(
                    f"a list of {length} tokens and its forms make {tokens}, more than the model's "
                    f"{inputs.max_positions} positions: choose shorter lengths"
                )
            lists.append(stock)
    settings = {"lengths": sorted(options.lengths), "seed": options.seed}
    return ExtractionTask(lists, settings=settings)


def _stock_list(
    tokenizer: PreTrainedTokenizerBase, length: int, generator: random.Random
) -> StockList:
    """Entries until the next one would exceed ``length`` tokens."""
    numbers = generator.sample(range(1000, 10_000), length // 16)
    entries: list[tuple[int, Entry]] = []
    text = HEAD
    for number in numbers:
        entry = _entry(generator)
        longer = text + _as_text(number, entry)
        if len(tokenizer(longer + TURN, verbose=False)["input_ids"]) > length:
            break
        text = longer
        entries.append((number, entry))
    if len(entries) < FORMS:
        raise InputError(
            f"a list of {length} tokens has room for {len(entries)} entries, of which {FORMS} are "
            "asked for: choose a longer length"
        )
    places = [round(at * (len(entries) - 1) / (FORMS - 1)) for at in range(FORMS)]
    generator.shuffle(places)
    forms = tuple((at / (len(entries) - 1), _form(tokenizer, *entries[at])) for at in places)
    return StockList(length, tokens_of(tokenizer, text + TURN, first=True), forms)


def _entry(generator: random.Random) -> Entry:
    return {
        "item": f"{generator.choice(KINDS)} {generator.choice(THINGS)}",
        "colour": generator.choice(COLOURS),
        "weight": f"{generator.randrange(100, 1000)} grams",
        "shelf": f"{generator.choice('ABCDEFGH')}{generator.randrange(10, 100)}",
        "price": f"{generator.randrange(10, 100)}.{generator.randrange(10, 100)}",
        "from": generator.choice(TOWNS),
    }


def _as_text(number: int, entry: Entry) -> str:
    fields = "".join(f"- {name}: {value}\n" for name, value in entry.items())
    return f"\nEntry {number}\n{fields}"


def _form(
    tokenizer: PreTrainedTokenizerBase, number: int, entry: Entry
) -> tuple[tuple[str, Tensor, Tensor], ...]:
    """``(field, question, answer)``: together they are the entry as the list has it."""
    fields = []
    before = f"\nEntry {number}\n"
    for name, value in entry.items():
        question = tokens_of(tokenizer, f"{before}- {name}:")
        fields.append((name, question, tokens_of(tokenizer, f" {value}\n")))
        before = ""
    return tuple(fields)
