"""What is known at a few lengths of a text that grows, for when it is cut back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

KEPT = 4  # checkpoints
PART, TURN = 0, 1  # ranks: within a prompt, and where one begins or ends

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Checkpoint(Generic[State]):
    """The state of the first ``length`` tokens."""

    length: int
    state: State
    rank: int


@dataclass(frozen=True, slots=True)
class Checkpoints(Generic[State]):
    """At most `KEPT` checkpoints, by length. Immutable, as their states have to be.

    The newest two always stay: an answer is taken back to where it or its question began. Of the
    others those within a prompt go first, and of several the one that leaves the shortest gap; so
    the end of a long prefix outlasts that of a short text after it.
    """

    held: tuple[Checkpoint[State], ...] = ()

    @property
    def states(self) -> list[State]:
        """Of all of them, by length."""
        return [each.state for each in self.held]

    def noted(self, length: int, state: State, rank: int) -> Checkpoints[State]:
        """With the state of the first ``length`` tokens, no fewer than any before."""
        held = list(self.held)
        if held and held[-1].length == length:
            rank = max(rank, held.pop().rank)
        held.append(Checkpoint(length, state, rank))
        if len(held) > KEPT:
            del held[min(range(KEPT - 1), key=partial(_worth, held))]
        return Checkpoints(tuple(held))

    def at(self, length: int) -> State | None:
        """The state of the first ``length`` tokens, if it is known."""
        return next((each.state for each in self.held if each.length == length), None)

    def last_before(self, length: int) -> Checkpoint[State] | None:
        """The one of the most tokens that are fewer than ``length``."""
        return next((each for each in reversed(self.held) if each.length < length), None)

    def first_beyond(self, length: int) -> Checkpoint[State] | None:
        """The one of the fewest tokens that are more than ``length``."""
        return next((each for each in self.held if each.length > length), None)

    def truncated(self, length: int) -> Checkpoints[State]:
        """Those of ``length`` tokens at most."""
        return Checkpoints(tuple(each for each in self.held if each.length <= length))

    def mapped(self, change: Callable[[State], State]) -> Checkpoints[State]:
        """The same with other states."""
        return Checkpoints(tuple(replace(each, state=change(each.state)) for each in self.held))


def _worth(held: Sequence[Checkpoint[Any]], place: int) -> tuple[int, int]:
    """Rank, and the gap that the absence of the checkpoint at ``place`` would leave."""
    before = held[place - 1].length if place else 0
    return held[place].rank, held[place + 1].length - before
