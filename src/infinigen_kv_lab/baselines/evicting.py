"""Policies that keep a fixed share of the tokens by the attention these got, and evict the rest."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from infinigen_kv.attention.dense import decode_weights
from infinigen_kv.policies.base import Policy
from infinigen_kv.policies.entry import Scoring
from infinigen_kv.policies.settings import PolicySettings
from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.checkpoints import TURN, Checkpoints
from infinigen_kv.rehearsal.select import Selection
from infinigen_kv.storage.pools.pool import Pool
from infinigen_kv_lab.baselines.scoring import (
    Attention,
    budgets,
    counted,
    exact_attention,
    keys_with_new,
    side_by_side,
)
from infinigen_kv_lab.baselines.survivors import Survivors


class EvictingPolicy(Policy):
    """Attend to the tokens that have survived, note what they got, evict what exceeds the budget.

    A prompt is read in full, and evicts nothing: the first step that selects does. From then on a
    token that is not attended to never comes back, though the home still has it. A later prompt in
    several tokens attends to all that the home has, as under every policy, and its tokens join the
    survivors.

    The states before each token of the latest forward are kept, so that one that failed, or drafts
    that were rejected, can be taken back exactly, and so are some from before and after a prompt
    (`Checkpoints`). Going back to any other length, the window of recent tokens is filled up again
    from the home, and the attention of removed queries stays counted.

    Subclasses say what they note of a token, and what makes one worth keeping.
    """

    needs_weights = True

    def __init__(
        self, scoring: Scoring, settings: PolicySettings, *, facts: int, dtype: torch.dtype
    ) -> None:
        """``facts`` numbers of ``dtype`` are noted of each token and head."""
        self._facts = facts, dtype
        self._scoring = scoring
        self._settings = settings
        self._state: Survivors | None = None
        self._before: list[Survivors] = []
        self._checkpoints: Checkpoints[Survivors] = Checkpoints()
        self._visible: Tensor | None = None
        self._picked: Selection | None = None

    @abstractmethod
    def note(self, facts: Tensor, attention: Attention) -> None:
        """Add what Q consecutive queries gave, in place, to ``facts`` ``(B, H_kv, n, W)``."""

    @abstractmethod
    def worth(self, facts: Tensor, positions: Tensor) -> Tensor:
        """``(B, H_kv, n)`` float: the least is evicted first. ``positions`` ``(B, H_kv, n)``."""

    @abstractmethod
    def window(self, budget: int) -> int:
        """Newest tokens, of ``budget``, that are not evicted; at least 1."""

    @property
    def last_queries(self) -> int | None:
        """How many of a forward's last queries matter; None for all."""
        return None

    @property
    def nbytes(self) -> int:
        states = [*self._before, *self._checkpoints.states]
        states += [] if self._state is None else [self._state]
        return sum(state.nbytes for state in {id(each): each for each in states}.values())

    def plan(self, step: Step, pool: Pool) -> Selection | None:
        """The survivors, once those beyond the budget are evicted; None where all are wanted."""
        if self._state is None or step.queries > 1 or not step.selecting:
            return None
        self._state, selection = self._evict(self._state, step)
        return selection

    def select_at_layer(self, query: Tensor, step: Step, pool: Pool) -> Selection | None:
        """As `plan`, in a layer without a predecessor."""
        return self.plan(step, pool)

    def attended(self, weights: Tensor, selection: Selection | None, step: Step) -> None:
        """Note the attention of a step with one query per row, and its own token."""
        state = self._state
        if state is None:
            state = Survivors.none(weights.shape[0], weights.shape[1], weights, self._facts)
        if selection is None and state.index is not None:  # columns are positions
            own = weights[..., -1:]
            weights = torch.cat([weights[..., :-1].gather(2, state.index), own], dim=2)
        self._before = [state]
        self._visible = step.visible
        self._state = self._after(state, weights, step, 0)

    def observe(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        step: Step,
        pool: Pool,
        slots: Tensor | None,
    ) -> None:
        if step.queries == 1:
            return  # `attended` says it all
        state = self._state
        if state is None:
            state = Survivors.none(keys.shape[0], keys.shape[1], keys, self._facts)
        everything = keys_with_new(pool, keys, step.start)
        self._visible = step.visible
        if step.selecting:
            self._state = self._one_by_one(state, query, everything, step)
        else:
            self._before = [state]
            if state.length:
                self._checkpoints = self._checkpoints.noted(state.length, state, TURN)
            self._state = self._read(state, query, everything, step)
            if step.may_end_prompt:
                held = self._state.length
                self._checkpoints = self._checkpoints.noted(held, self._state, TURN)

    def select(self, step: Step, pool: Pool) -> Selection | None:
        picked, self._picked = self._picked, None
        return picked

    def truncate(self, length: int) -> None:
        if length == 0:
            self._state, self._before = None, []
        self._checkpoints = self._checkpoints.truncated(length) if length else Checkpoints()
        if self._state is None or length >= self._state.length:
            return
        exact = [place for place, each in enumerate(self._before) if each.length == length]
        if exact:
            self._state = self._before[exact[0]]
            self._before = self._before[: exact[0]]
        elif (known := self._checkpoints.at(length)) is not None:
            self._state, self._before = known, []
        else:
            self._state, self._before = self._state.truncated(length, self._visible), []

    def take_rows(self, index: Tensor) -> None:
        if self._state is not None:
            self._state = self._state.rows(index)
        self._before = [each.rows(index) for each in self._before]
        self._checkpoints = self._checkpoints.mapped(lambda state: state.rows(index))
        if self._visible is not None:
            self._visible = self._visible[index.to(self._visible.device)]

    # Parts of the above.

    def _read(self, state: Survivors, query: Tensor, keys: Tensor, step: Step) -> Survivors:
        """A prompt's tokens, all of which see everything before them."""
        old = state.columns
        index = state.index
        state = state.extended(step.queries, _new_flags(step))
        first = 0 if self.last_queries is None else max(0, step.queries - self.last_queries)
        for block, attention in exact_attention(query, keys, step, self._scoring, first):
            if index is not None:  # what was evicted is seen, but not noted
                attention = _of_columns(attention, index, step.start)
            self.note(state.facts[:, :, : old + block.stop], attention)
        return state

    def _one_by_one(self, state: Survivors, query: Tensor, keys: Tensor, step: Step) -> Survivors:
        """Several queries, each of which selects as a step of its own would."""
        self._before, selections = [], []
        for place in range(step.queries):
            self._before.append(state)
            state, selection = self._evict(state, step, place)
            selections.append(selection)
            weights = self._weights(state, query[:, :, place : place + 1], keys, step.start + place)
            state = self._after(state, weights, step, place)
        self._picked = side_by_side(selections, step.start)
        return state

    def _evict(self, state: Survivors, step: Step, query: int = 0) -> tuple[Survivors, Selection]:
        """What is left of a state when a query comes, and what that query attends to."""
        allowed, held = budgets(step, self._settings, query), state.held()
        rows = max(len(allowed), len(held))
        counts = [min(pair) for pair in zip(_each(allowed, rows), _each(held, rows), strict=True)]
        if state.real is None and set(counts) == {state.columns}:
            state = state.indexed()
        else:
            worth = self._protected(state, step, query, _each(allowed, rows))
            if state.real is None and set(counts) == {state.columns - 1}:
                state = state.without_worst(worth)
            else:  # also puts those that are real first
                state = state.best(worth, counts)
        return state, Selection(state.positions.unsqueeze(2), counted(counts, state.facts.device))

    def _protected(self, state: Survivors, step: Step, query: int, allowed: list[int]) -> Tensor:
        """Worth of each token; infinite in the window of recent ones."""
        positions = state.positions
        worth = self.worth(state.facts, positions)
        windows = [self.window(each) for each in allowed]
        if step.visible is None:
            return worth.masked_fill(positions >= step.start + query - windows[0], float("inf"))
        logical = step.logical.to(positions.device).unsqueeze(1).expand(*positions.shape[:2], -1)
        first = step.before[:, query].to(positions.device) - torch.tensor(windows).to(positions)
        return worth.masked_fill(logical.gather(2, positions) >= first[:, None, None], float("inf"))

    def _after(self, state: Survivors, weights: Tensor, step: Step, query: int) -> Survivors:
        """The state once a query has given ``weights`` ``(B, H_kv, n + 1)`` and joined."""
        new = None
        if step.visible is not None:
            place = step.start + query
            new = step.visible[:, place : place + 1].to(weights.device)
        state = state.extended(1, new)
        self.note(state.facts, _single(weights, state.real, new))
        return state

    def _weights(self, state: Survivors, query: Tensor, keys: Tensor, position: int) -> Tensor:
        """What a query ``(B, H, 1, D)`` gives the survivors and its own token at ``position``."""
        own = keys[:, :, position : position + 1]
        order = state.positions.unsqueeze(3).expand(-1, -1, -1, keys.shape[3])
        visible = None
        if state.real is not None:
            visible = F.pad(state.real, (0, 1), value=True)[:, None, None]
        return decode_weights(
            query,
            torch.cat([keys.gather(2, order), own], dim=2),
            scaling=self._scoring.scaling,
            softcap=self._scoring.softcap,
            visible=visible,
        )


def _each(numbers: list[int], rows: int) -> list[int]:
    return numbers * rows if len(numbers) == 1 else numbers


def _new_flags(step: Step) -> Tensor | None:
    return None if step.visible is None else step.visible[:, step.start :]


def _of_columns(attention: Attention, index: Tensor, start: int) -> Attention:
    """Attention to the tokens ``index`` ``(B, H_kv, n)`` and those from ``start`` on."""
    rows, heads, queries, tokens = attention.weights.shape
    wide = index.unsqueeze(2).expand(rows, heads, queries, -1)
    seen = attention.seen.expand(rows, heads, queries, tokens)
    old, new = attention.weights[..., :start].gather(3, wide), attention.weights[..., start:]
    kept, fresh = seen[..., :start].gather(3, wide), seen[..., start:]
    return Attention(
        torch.cat([old, new], dim=3), torch.cat([kept, fresh], dim=3), attention.average
    )


def _single(weights: Tensor, real: Tensor | None, new: Tensor | None) -> Attention:
    """One query's attention ``(B, H_kv, n + 1)`` to the real ones of its columns."""
    weights = weights.unsqueeze(2)
    if real is None:
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=weights.device)
        seen_tokens: int | Tensor = weights.shape[3]
    else:
        seen = real[:, None, None] if new is None else (real & new)[:, None, None]
        seen_tokens = seen.sum(dim=3, keepdim=True).clamp_min(1)
    # the sum is the number of queries in the group, but for rounding
    return Attention(weights, seen, weights.sum(dim=3, keepdim=True).round() / seen_tokens)
