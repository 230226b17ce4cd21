"""Log-likelihoods and greedy answers, with selection after the first tokens of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infinigen_kv_lab.evals.reading import Reader, Reading

Score = tuple[float, bool]
"""Log-likelihood of a continuation in nats, and whether greedy decoding would have given it."""


def score(
    reader: Reader, context: Sequence[int], continuations: Sequence[Sequence[int]], *, exact: int
) -> list[Score]:
    """Score continuations of one context, which is read once.

    Parameters
    ----------
    context, continuations
        Token ids; none may be empty. Where both together exceed the model's positions, the
        context's oldest tokens are left out.
    exact
        The first tokens of the text that are read in full; each later one selects like a decode
        step.
    """
    longest = max(len(each) for each in continuations)
    limit = reader.session.adapter.max_positions
    if limit is not None:  # the last token is not read
        context = context[-max(1, limit + 1 - longest) :]
    reading = _read(reader, context, room=longest - 1, exact=exact)
    scores = []
    for place, continuation in enumerate(continuations):
        is_last = place == len(continuations) - 1
        scores.append(
            _score(reading if is_last else reading.fork(), continuation, len(context), exact)
        )
    return scores


def generate(
    reader: Reader,
    context: Sequence[int],
    *,
    exact: int,
    new_tokens: int,
    end_tokens: set[int],
    is_over: Callable[[list[int]], bool],
) -> list[int]:
    """Greedy tokens after a context, the end token left out.

    Parameters
    ----------
    is_over
        Called with the tokens so far after each one; True ends the answer.
    """
    limit = reader.session.adapter.max_positions
    if limit is not None:
        context = context[-max(1, limit - new_tokens) :]
    reading = _read(reader, context, room=new_tokens, exact=exact)
    made: list[int] = []
    while len(made) < new_tokens:
        token = int(reading.last.argmax())
        if token in end_tokens:
            break
        made.append(token)
        if is_over(made):
            break
        reading.feed(torch.tensor([token]))
    return made


def _read(reader: Reader, context: Sequence[int], *, room: int, exact: int) -> Reading:
    tokens = torch.tensor(context)
    reading = reader.start(tokens[:exact], room=len(tokens[exact:]) + room)
    reading.feed(tokens[exact:])
    return reading


def _score(reading: Reading, continuation: Sequence[int], read: int, exact: int) -> Score:
    """Score a continuation after ``read`` tokens."""
    targets = torch.tensor(continuation, device=reading.last.device)
    first, fed = reading.last[None], targets[:-1]
    early = max(0, exact - read)
    logits = torch.cat([first, reading.feed_prompt(fed[:early]), reading.feed(fed[early:])])
    return _summed(logits.log_softmax(-1), targets)


def _summed(logits: Tensor, targets: Tensor) -> Score:
    total = logits.gather(1, targets[:, None]).double().sum().item()
    return total, bool((logits.argmax(-1) == targets).all())
