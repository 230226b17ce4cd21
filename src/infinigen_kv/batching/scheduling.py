"""Requests one after the other through the rows of a batch, first come, first served."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infinigen_kv.batching.batch import InfiniGenBatch
from infinigen_kv.batching.row import Row, TokenIds
from infinigen_kv.checks import check_integer
from infinigen_kv.config import PROMPT_CHUNK
from infinigen_kv.errors import InputError


class BatchMaker(Protocol):
    """An attached model: a session."""

    model: PreTrainedModel

    @property
    def new_batch(self) -> Callable[..., InfiniGenBatch]:
        """`Session.new_batch`, with whatever options the session has."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt to continue: token ids ``(T,)`` or ``(1, T)``, and how many new ones at most.

    Raises
    ------
    InputError
        If the prompt is empty or ``max_new_tokens`` below 1.
    """

    prompt_ids: TokenIds
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        check_integer("max_new_tokens", self.max_new_tokens, 1)
        if self.prompt_tokens == 0:
            raise InputError("the prompt is empty: give at least one token")

    @property
    def prompt_tokens(self) -> int:
        """T."""
        given = self.prompt_ids
        return given.shape[-1] if isinstance(given, Tensor) else len(given)

    @property
    def tokens(self) -> int:
        """Tokens of prompt and continuation together."""
        return self.prompt_tokens + self.max_new_tokens


def generate_rows(
    session: BatchMaker,
    requests: Sequence[Request],
    *,
    rows: int = 8,
    stop_tokens: Iterable[int] | None = None,
    chunk: int | None = PROMPT_CHUNK,
    **options: Any,
) -> list[list[int]]:
    """Continue all requests greedily, up to ``rows`` at a time; the new tokens of each.

    Parameters
    ----------
    session
        From `attach`.
    requests
        In the order in which they are read.
    rows
        Rows of the batch.
    stop_tokens
        Tokens that end a continuation, and are its last one; None for the model's own.
    chunk
        As for `InfiniGenBatch.join`.
    **options
        Of `Session.new_batch`: policy, storage and so on.

    Raises
    ------
    InputError
        If a request is longer than the model's positions, or an option is not valid.
    """
    if not requests:
        return []
    stop = _stop_tokens(session.model.generation_config) if stop_tokens is None else stop_tokens
    tokens = max(request.tokens for request in requests)
    found: dict[int, list[int]] = {}
    with session.new_batch(rows=rows, tokens=tokens, **options) as batch:
        found.update(run_requests(batch, requests, stop_tokens=stop, chunk=chunk))
    return [found[number] for number in range(len(requests))]


def run_requests(
    batch: InfiniGenBatch,
    requests: Iterable[Request],
    *,
    stop_tokens: Iterable[int] = (),
    chunk: int | None = PROMPT_CHUNK,
) -> Iterator[tuple[int, list[int]]]:
    """As `generate_rows`, in a batch's free rows; yields number and tokens as requests finish.

    A request is taken from ``requests`` once there is a row for it.
    """
    stop = frozenset(stop_tokens)
    waiting = enumerate(requests)
    running: dict[Row, _Running] = {}
    while True:
        while batch.free or not running:
            following = next(waiting, None)
            if following is None:
                break
            row, joined = _join(batch, *following, chunk)
            running[row] = joined
        if not running:
            return
        for row in [row for row, each in running.items() if each.is_over(stop)]:
            done = running.pop(row)
            batch.release(row)
            yield done.number, done.token_ids
        if running:
            _step(batch, running)


@dataclass(slots=True)
class _Running:
    number: int
    request: Request
    token_ids: list[int]

    def is_over(self, stop: frozenset[int]) -> bool:
        return len(self.token_ids) >= self.request.max_new_tokens or self.token_ids[-1] in stop


def _join(
    batch: InfiniGenBatch, number: int, request: Request, chunk: int | None
) -> tuple[Row, _Running]:
    row = batch.join(request.prompt_ids, tokens=request.tokens, chunk=chunk)
    return row, _Running(number, request, [int(row.logits.argmax())])


def _step(batch: InfiniGenBatch, running: Mapping[Row, _Running]) -> None:
    logits = batch.step({row: each.token_ids[-1] for row, each in running.items()})
    for each, token in zip(running.values(), logits.argmax(-1).tolist(), strict=True):
        each.token_ids.append(token)


def _stop_tokens(generation_config: Any) -> list[int]:
    """The model's own end-of-sequence tokens: one, several or none."""
    own = generation_config.eos_token_id
    if own is None:
        return []
    return torch.as_tensor(own).reshape(-1).tolist()
