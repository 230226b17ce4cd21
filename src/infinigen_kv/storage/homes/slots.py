"""Which token lives in which slot of a limited pool, and which one makes room.

Bookkeeping of one batch row in one layer, without tensors. Key, value and partial key of a token
share its slot, so a pool, a partial key cache and a resident set that follow the same map agree.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from infinigen_kv.errors import CacheStateError, InputError
from infinigen_kv.rehearsal.checkpoints import PART, TURN, Checkpoints

Eviction = Literal["fifo", "lru", "counter"]
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)
SMALLEST_CAPACITY = 2  # tokens; with one slot the token just written would be the next victim
SATURATED = 255  # a counter has 8 bits

_SCORE = 1 << 32  # a rank is score * 2^32 + position, so that its minimum breaks ties by age
_LAST = np.iinfo(np.int64).max
_FIRST_RESERVE = 256

Slots = NDArray[np.int64]


class _Ranks(NamedTuple):
    """Ranks of some slots as they were with ``tokens_seen`` tokens."""

    tokens_seen: int
    slots: Slots | slice
    ranks: Slots
    clock: int
    most_counted: int


class SlotMap:
    """Slots of at most ``capacity`` tokens; a new token takes its victim's slot once all are used.

    ``fifo`` evicts the oldest token and ``lru`` the one whose last use is oldest; written counts
    as used, and tokens used in the same step go oldest first. ``counter`` evicts the token fetched
    in the fewest steps, the oldest of several, with 8-bit counters that are all halved when one
    saturates (InfiniGen, OSDI 2024, section 4.4).

    Two rules protect new tokens. The newest one is never a victim while there is another. And a
    token inherits its victim's counter, so that it starts level with the least wanted token rather
    than below all others: starting at 0, tokens written to a pool in steady use would only ever
    evict one another.

    A third keeps attention sinks: where a model puts the weight that its heads have no use for,
    losing the token costs far more than its rank tells. The first ``sinks`` tokens after `padding`
    are never victims, and where more tokens come at once than fit, those after the sinks go.

    What tokens that are taken back had fetched is taken back too, where that is known: of the
    newest token or step, and from a length at which the map was told to `remember`.

    Parameters
    ----------
    capacity
        Slots, at least 2; None for as many as there are tokens.
    eviction
        ``"fifo"``, ``"lru"`` or ``"counter"``.
    sinks
        Tokens that stay, at most ``capacity - 2``: more count as so many. 0 is as published.

    Raises
    ------
    InputError
        For another capacity or eviction, or a negative number of sinks.
    """

    def __init__(
        self, capacity: int | None, eviction: Eviction = "counter", *, sinks: int = 0
    ) -> None:
        if capacity is not None and capacity < SMALLEST_CAPACITY:
            raise InputError(
                f"capacity={capacity!r} is not valid: it must be an integer >= "
                f"{SMALLEST_CAPACITY}, or None for no limit"
            )
        if eviction not in EVICTIONS:
            raise InputError(
                f"eviction={eviction!r} is not valid: it must be one of {', '.join(EVICTIONS)}"
            )
        if sinks < 0:
            raise InputError(f"sinks={sinks!r} is not valid: it must be an integer >= 0")
        self.capacity = capacity
        self.eviction = eviction
        self.sinks = sinks if capacity is None else min(sinks, capacity - SMALLEST_CAPACITY)
        self.padding = 0
        """Tokens before the row's first real one; to be set before that one is added."""
        self.length = 0
        self.tokens_seen = 0
        reserve = min(_FIRST_RESERVE, capacity or _FIRST_RESERVE)
        self._positions: Slots = np.empty(reserve, np.int64)
        self._ranks: Slots = np.empty(reserve, np.int64)  # the least is the next victim
        self._sink_slots: Slots = np.empty(0, np.int64)
        self._newest = -1  # slot of the token written last
        self._clock = 0  # of lru: one tick per write or step
        self._most_counted = 0  # of counter: no counter is above
        self._past: list[_Ranks] = []  # before each touch since the last token but one
        self._touched = False  # since `remember`
        self._checkpoints: Checkpoints[_Ranks] = Checkpoints()

    @property
    def positions(self) -> Slots:
        """Logical position of the token in each slot, ``(length,)``; not to be written to."""
        return self._positions[: self.length]

    @property
    def counts(self) -> Slots:
        """Counter of each slot, ``(length,)``; all 0 unless the eviction is ``counter``."""
        scores = self._ranks[: self.length] >> 32
        return scores if self.eviction == "counter" else np.zeros_like(scores)

    def add(self, count: int) -> Slots:
        """Give slots to the next ``count`` tokens.

        The tokens of one call do not evict one another, unless there are more than fit: then the
        first of them, sinks aside, get no slot.

        Returns
        -------
        numpy.ndarray
            ``(count,)`` slots in the order of the tokens, no slot twice; -1 for a token that is
            dropped at once.
        """
        if count < 0:
            raise InputError(f"count={count!r} is not valid: it must be an integer >= 0")
        positions = self._kept_of(count)
        kept = len(positions)
        self._past = [each for each in self._past if each.tokens_seen == self.tokens_seen]
        free = kept if self.capacity is None else min(kept, self.capacity - self.length)
        victims = self._victims(kept - free)
        self._reserve(self.length + free)
        fresh = np.arange(self.length, self.length + free, dtype=np.int64)
        self._ranks[fresh] = 0
        self.length += free
        slots = np.concatenate([fresh, victims]) if free else victims
        if kept:
            self._write(slots, positions)
        start, self.tokens_seen = self.tokens_seen, self.tokens_seen + count
        if kept == count:
            return slots
        given = np.full(count, -1, np.int64)
        given[positions - start] = slots
        return given

    def touch(self, slots: Slots) -> None:
        """Note that the tokens in ``slots`` were fetched in this step.

        Call once a step, with what all heads fetched: a slot that appears twice counts once.

        Raises
        ------
        InputError
            Where a slot is not in use.
        """
        slots = np.ascontiguousarray(slots, dtype=np.int64).reshape(-1)
        if slots.size == 0:
            return
        if slots.view(np.uint64).max() >= self.length:  # negative ones are huge
            raise InputError(
                f"slots from {slots.min()} to {slots.max()} were touched: they must be in "
                f"use, 0 to {self.length - 1}"
            )
        self._note_before(slots)
        if self.eviction == "lru":
            self._clock += 1
            self._ranks[slots] = self._positions[slots] + self._clock * _SCORE
        elif self.eviction == "counter":
            self._ranks[slots] += _SCORE
            self._most_counted += 1
            if self._most_counted >= SATURATED:
                self._halve_if_saturated()

    def remember(self) -> None:
        """This is a length to which the map may be taken back: a prompt begins or has ended."""
        self._past = []
        if self.tokens_seen > self.length:  # there is no way back
            self._checkpoints = Checkpoints()
            return
        known, rank = self._of(slice(self.length)), TURN if self._touched else PART
        self._checkpoints = self._checkpoints.noted(self.tokens_seen, known, rank)
        self._touched = False

    def truncate(self, tokens_seen: int) -> None:
        """Forget the tokens from position ``tokens_seen`` on; more than there are forgets none.

        Raises
        ------
        CacheStateError
            Where tokens were evicted: those that had to go for the forgotten ones are lost. All
            tokens can always be forgotten.
        """
        tokens_seen = max(0, tokens_seen)
        self.padding = self.padding if tokens_seen else 0
        evicted = self.tokens_seen - self.length
        if evicted and 0 < tokens_seen < self.tokens_seen:
            raise CacheStateError(
                f"cannot go back from {self.tokens_seen} to {tokens_seen} tokens, since {evicted} "
                f"were evicted at a capacity of {self.capacity}: start again with an empty cache, "
                "or set no capacity"
            )
        self._undo(tokens_seen)
        if tokens_seen >= self.tokens_seen:
            return
        self.length = self.tokens_seen = tokens_seen
        self._sink_slots = self._sink_slots[self._sink_slots < tokens_seen]
        self._newest = tokens_seen - 1

    def copy(self) -> SlotMap:
        """An independent map in the same state, for a row that is repeated."""
        other = SlotMap(self.capacity, self.eviction, sinks=self.sinks)
        other.__dict__.update(self.__dict__)
        other._positions = self._positions.copy()
        other._ranks = self._ranks.copy()
        other._past = list(self._past)
        return other

    def _of(self, slots: Slots | slice) -> _Ranks:
        ranks = self._ranks[slots].copy()
        return _Ranks(self.tokens_seen, slots, ranks, self._clock, self._most_counted)

    def _note_before(self, slots: Slots) -> None:
        """Keep what a touch of these slots is going to change."""
        if self.eviction == "fifo" or self.tokens_seen > self.length:
            return
        halving = self.eviction == "counter" and self._most_counted + 1 >= SATURATED
        self._past.append(self._of(slice(self.length) if halving else slots.copy()))
        self._touched = True

    def _undo(self, tokens_seen: int) -> None:
        """Let the ranks be what they were with so many tokens, as far as is known."""
        known = self._checkpoints.at(tokens_seen)
        self._checkpoints = self._checkpoints.truncated(tokens_seen)
        while self._past and self._past[-1].tokens_seen >= tokens_seen:
            self._put_back(self._past.pop())
        if known is not None and tokens_seen < self.tokens_seen:
            self._put_back(known)

    def _put_back(self, before: _Ranks) -> None:
        self._ranks[before.slots] = before.ranks
        self._clock, self._most_counted = before.clock, before.most_counted

    def _kept_of(self, count: int) -> Slots:
        """Positions of those among the next ``count`` tokens that get a slot."""
        new = np.arange(self.tokens_seen, self.tokens_seen + count, dtype=np.int64)
        if self.capacity is None:
            return new
        dropped = count - (self.capacity - len(self._sink_slots))
        if dropped <= 0:
            return new
        return np.delete(new, np.flatnonzero(~self._are_sinks(new))[:dropped])

    def _are_sinks(self, positions: Slots) -> NDArray[np.bool_]:
        return (positions >= self.padding) & (positions < self.padding + self.sinks)

    def _victims(self, count: int) -> Slots:
        """The ``count`` slots to overwrite, the first victim first."""
        if count <= 0:
            return np.empty(0, np.int64)
        ranks = self._ranks[: self.length]
        spared = np.append(self._sink_slots, self._newest)
        before = ranks[spared]
        ranks[self._newest] = _LAST - 1
        ranks[self._sink_slots] = _LAST
        victims = np.argsort(ranks)[:count] if count > 1 else np.array([ranks.argmin()])
        ranks[spared] = before
        return victims

    def _write(self, slots: Slots, positions: Slots) -> None:
        """The next tokens, at these ``positions``, now live in ``slots``."""
        self._positions[slots] = positions
        if positions[0] < self.padding + self.sinks:
            found = slots[self._are_sinks(positions)]
            self._sink_slots = np.concatenate([self._sink_slots, found])
        ranks = positions
        if self.eviction == "counter":
            ranks = positions + (self._ranks[slots] & -_SCORE)
        elif self.eviction == "lru":
            self._clock += 1
            ranks = positions + self._clock * _SCORE
        self._ranks[slots] = ranks
        self._newest = int(slots[-1])

    def _halve_if_saturated(self) -> None:
        ranks = self._ranks[: self.length]
        self._most_counted = int(ranks.max()) >> 32
        if self._most_counted >= SATURATED:
            ranks[:] = (ranks >> 33) * _SCORE + self._positions[: self.length]
            self._most_counted >>= 1

    def _reserve(self, tokens: int) -> None:
        if tokens <= len(self._ranks):
            return
        more = max(tokens, len(self._ranks) * 3 // 2) - len(self._ranks)
        self._positions = np.concatenate([self._positions, np.empty(more, np.int64)])
        self._ranks = np.concatenate([self._ranks, np.empty(more, np.int64)])
