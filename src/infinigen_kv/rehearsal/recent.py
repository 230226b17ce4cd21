"""Tokens that a layer's running sums have not seen yet: sums of many at once cost less, and tokens
that are taken back at once leave no trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from infinigen_kv.rehearsal.checkpoints import PART, TURN

MIN_WAITING = 32  # of the newest tokens that always wait, so that any of them can be taken back
MAX_WAITING = 64  # tokens that wait when others come; a draft that is verified at once is no longer


class ForwardPlace(Protocol):
    """Where in a text a forward is; a `policies.step.Step`, where each field is described."""

    start: int
    queries: int
    selecting: bool

    @property
    def before(self) -> Tensor: ...

    @property
    def may_end_prompt(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Q consecutive tokens, as `PromptStatistics.observe` takes them.

    Parameters
    ----------
    start
        Tokens before them, padding included.
    begins, ends
        Ranks of the `Checkpoints` that their sums want before the first and after the last of them;
        None for none.
    """

    query: Tensor  # (B, H, Q, D)
    key: Tensor  # (B, H_kv, Q, D)
    value: Tensor  # (B, H_kv, Q, D_v)
    position: Tensor  # (B or 1, Q)
    weight: Tensor | None  # (B, Q)
    start: int
    begins: int | None = None
    ends: int | None = None

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, step: ForwardPlace, weight: Tensor | None
    ) -> SeenTokens:
        """A forward's new tokens, of which those with a ``weight`` of 0 do not count."""
        begins = ends = None
        if not step.selecting and step.queries > 1:
            begins, ends = TURN, TURN if step.may_end_prompt else PART
        position = step.before.to(key.device)
        weight = None if weight is None else weight.to(key.device)
        return cls(query, key, value, position, weight, step.start, begins, ends)

    def weighing(self, weight: Tensor) -> SeenTokens:
        """The same tokens, weighed otherwise."""
        return replace(self, weight=weight.to(self.key.device))

    @property
    def tokens(self) -> int:
        """Q."""
        return self.key.shape[2]

    @property
    def end(self) -> int:
        """Tokens until the last of them, padding included."""
        return self.start + self.tokens

    @property
    def real_before(self) -> Tensor:
        """Real tokens before them, ``(B,)``."""
        return self.position[:, 0].expand(self.key.shape[0])

    @property
    def real_after(self) -> Tensor:
        """Real tokens until the last of them, ``(B,)``."""
        last = 1 if self.weight is None else self.weight[:, -1].to(self.position)
        return self.position[:, -1].expand(self.key.shape[0]) + last

    def part(self, some: slice) -> SeenTokens:
        """Those of the places ``some``."""
        first, last, _ = some.indices(self.tokens)
        return replace(
            self,
            query=self.query[:, :, some],
            key=self.key[:, :, some],
            value=self.value[:, :, some],
            position=self.position[:, some],
            weight=None if self.weight is None else self.weight[:, some],
            start=self.start + first,
            begins=self.begins if first == 0 else None,
            ends=self.ends if last == self.tokens else None,
        )

    def first(self, count: int) -> SeenTokens:
        """The oldest ``count`` of them."""
        return self.part(slice(0, count))

    def last(self, count: int) -> SeenTokens:
        """The newest ``count`` of them, in memory of their own."""
        part = self.part(slice(self.tokens - count, self.tokens))
        tensors = {name: getattr(part, name).clone() for name in ("query", "key", "value")}
        return replace(part, **tensors)

    def rows(self, index: Tensor) -> SeenTokens:
        """Those of the batch rows ``index``."""
        position, weight = self.position, self.weight
        if position.shape[0] > 1:
            position = position[index.to(position.device)]
        if weight is not None:
            weight = weight[index.to(weight.device)]
        index = index.to(self.key.device)
        return replace(
            self,
            query=self.query[index],
            key=self.key[index],
            value=self.value[index],
            position=position,
            weight=weight,
        )

    def detached(self) -> SeenTokens:
        """Without the graph that made them."""
        if not (self.query.requires_grad or self.key.requires_grad or self.value.requires_grad):
            return self
        return replace(
            self, query=self.query.detach(), key=self.key.detach(), value=self.value.detach()
        )


class RecentTokens:
    """Tokens in the order of their forwards."""

    def __init__(self, forwards: Iterable[SeenTokens] = ()) -> None:
        self._forwards = list(forwards)
        self._count = sum(each.tokens for each in self._forwards)

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self._count

    def add(self, tokens: SeenTokens) -> None:
        """Keep the tokens of a forward; their tensors are not copied."""
        self._forwards.append(tokens.detached())
        self._count += tokens.tokens

    def take(self, count: int) -> list[SeenTokens]:
        """Move the oldest ``count`` tokens out; see `runs`."""
        oldest, count = RecentTokens(), max(0, min(count, self._count))
        self._count -= count
        while count > 0:
            forward = self._forwards.pop(0)
            if forward.tokens > count:
                self._forwards.insert(0, forward.last(forward.tokens - count))
                forward = forward.first(count)
            oldest.add(forward)
            count -= forward.tokens
        return oldest.runs()

    def runs(self) -> list[SeenTokens]:
        """All of them, joined but for where a checkpoint is wanted."""
        found: list[list[SeenTokens]] = []
        for each in self._forwards:
            if not found or each.begins is not None or found[-1][-1].ends is not None:
                found.append([])
            found[-1].append(each)
        return [_joined(run) for run in found]

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on, as far as they are still here."""
        kept = [each for each in self._forwards if each.start < length]
        kept = [each if each.end <= length else each.first(length - each.start) for each in kept]
        self._forwards, self._count = kept, sum(each.tokens for each in kept)

    def rows(self, index: Tensor) -> RecentTokens:
        """Those of the batch rows ``index``."""
        return RecentTokens(each.rows(index) for each in self._forwards)

    def copy(self) -> RecentTokens:
        """The same tokens, to be added to apart."""
        return RecentTokens(self._forwards)


def _joined(run: list[SeenTokens]) -> SeenTokens:
    if len(run) == 1:
        return run[0]
    rows = run[0].key.shape[0]
    weight = None
    if any(each.weight is not None for each in run):
        weight = torch.cat([_weight(each) for each in run], dim=1)
    tensors: dict[str, Any] = {
        name: torch.cat([getattr(each, name) for each in run], dim=2)
        for name in ("query", "key", "value")
    }
    position = torch.cat([each.position.expand(rows, -1) for each in run], dim=1)
    return replace(run[0], position=position, weight=weight, ends=run[-1].ends, **tensors)


def _weight(tokens: SeenTokens) -> Tensor:
    """``(B, Q)`` float, 1 where every row's token counts."""
    if tokens.weight is not None:
        return tokens.weight.float()
    return torch.ones(tokens.key.shape[0], tokens.tokens, device=tokens.key.device)
