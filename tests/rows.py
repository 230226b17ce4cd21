"""Requests of different lengths and the order in which they join, step and leave a batch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from calibrating import feed, tokens
from infinigen_kv import Session
from infinigen_kv.batching.batch import InfiniGenBatch
from infinigen_kv.batching.row import Row
from infinigen_kv.cache.forward import prefill

Event = tuple[Literal["join", "step", "leave"], tuple[int, ...]]


@dataclass(frozen=True)
class Script:
    """Random prompts and what follows them, token by token, and an order of events."""

    prompts: tuple[int, ...]
    new: tuple[int, ...]
    events: tuple[Event, ...]

    def ids(self, request: int) -> Tensor:
        """``(1, prompt + new)``."""
        return tokens(1, self.prompts[request] + self.new[request], seed=100 + request)

    def alone(self, request: int) -> Script:
        """One request that nobody disturbs; it keeps its number."""
        steps: list[Event] = [("step", (request,))] * self.new[request]
        join: Event = ("join", (request,))
        return Script(self.prompts, self.new, (join, *steps))


def random_script(
    prompts: Sequence[int], new: Sequence[int], *, rows: int, seed: int = 0
) -> Script:
    """At most ``rows`` requests at a time join, leave and step in random subsets."""
    chance = random.Random(seed)
    waiting, active = list(range(len(prompts))), dict[int, int]()
    events: list[Event] = []
    while waiting or active:
        if waiting and len(active) < rows and chance.random() < 0.4:
            request = waiting.pop(chance.randrange(len(waiting)))
            active[request] = new[request]
            events.append(("join", (request,)))
            continue
        over = [request for request, left in active.items() if left == 0]
        if over and chance.random() < 0.5:
            del active[over[0]]
            events.append(("leave", (over[0],)))
            continue
        able = [request for request, left in active.items() if left > 0]
        chosen = chance.sample(able, chance.randint(1, len(able))) if able else []
        if chosen:
            for request in chosen:
                active[request] -= 1
            events.append(("step", tuple(chosen)))
    return Script(tuple(prompts), tuple(new), tuple(events))


def play(batch: InfiniGenBatch, script: Script) -> dict[int, Tensor]:
    """Logits of every request, the prompt's last position first: ``(1 + new, V)``."""
    rows: dict[int, Row] = {}
    fed: dict[int, int] = {}
    found: dict[int, list[Tensor]] = {}
    for kind, requests in script.events:
        if kind == "join":
            (request,) = requests
            fed[request] = script.prompts[request]
            rows[request] = batch.join(script.ids(request)[:, : fed[request]])
            found[request] = [rows[request].logits]
        elif kind == "leave":
            batch.release(rows.pop(requests[0]))
        else:
            step = {rows[each]: int(script.ids(each)[0, fed[each]]) for each in requests}
            for request, logits in zip(requests, batch.step(step), strict=True):
                fed[request] += 1
                found[request].append(logits)
    for row in rows.values():
        batch.release(row)
    return {request: torch.stack(logits) for request, logits in found.items()}


def single_run(session: Session, script: Script, request: int, **options: Any) -> Tensor:
    """As `play`, of a request in an ordinary cache of one row."""
    ids, prompt = script.ids(request), script.prompts[request]
    cache = session.new_cache(**options)
    try:
        logits = [prefill(session, cache, ids[:, :prompt])]
        logits += [
            feed(session.model, cache, ids, None, slice(at, at + 1))
            for at in range(prompt, ids.shape[1])
        ]
        return torch.cat(logits, dim=1)[0]
    finally:
        cache.close()


def lengths_of(rows: Iterable[Row]) -> list[int]:
    """Tokens that each row holds."""
    return [row.length for row in rows]
