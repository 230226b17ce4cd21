"""The tokens that a policy with a fixed budget has not evicted, and what it knows of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

LAST = float("inf")


@dataclass(frozen=True, slots=True)
class Survivors:
    """Tokens of one layer that are still attended to; the number is the same in all heads of a row.

    Immutable, so that an earlier state can be kept at no cost but its memory.

    Parameters
    ----------
    facts
        ``(B, H_kv, n, W)``: what the policy has noted of each token.
    index
        ``(B, H_kv, n)`` positions; None while these are all tokens, in order.
    real
        ``(B, n)`` boolean, False where there is no token or only padding; None for all True.
    length
        Tokens seen, evicted ones included.
    """

    facts: Tensor
    index: Tensor | None
    real: Tensor | None
    length: int

    @classmethod
    def none(cls, rows: int, heads: int, like: Tensor, facts: tuple[int, torch.dtype]) -> Survivors:
        """No tokens yet, with room for ``facts``, their number and dtype, on the device of
        ``like``.
        """
        width, dtype = facts
        shape = rows, heads, 0, width
        return cls(torch.empty(shape, dtype=dtype, device=like.device), None, None, 0)

    @property
    def columns(self) -> int:
        """n, those that are not real included."""
        return self.facts.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        parts = (self.facts, self.index, self.real)
        return sum(part.nbytes for part in parts if part is not None)

    def indexed(self) -> Survivors:
        """The same with an `index`."""
        return replace(self, index=self.positions)

    @property
    def positions(self) -> Tensor:
        """`index`, also where that is None."""
        if self.index is not None:
            return self.index
        order = torch.arange(self.columns, device=self.facts.device)
        return order.expand(self.facts.shape[:3])

    def held(self) -> list[int]:
        """Real tokens of each row; one number where it is the same for all."""
        return [self.columns] if self.real is None else self.real.sum(dim=1).tolist()

    def extended(self, tokens: int, real: Tensor | None) -> Survivors:
        """With the next ``tokens`` tokens, of which nothing is known; ``real`` ``(B, tokens)``."""
        rows, heads, columns, width = self.facts.shape
        facts = self.facts.new_zeros(rows, heads, columns + tokens, width)
        facts[:, :, :columns] = self.facts
        index = self.index
        if index is not None:
            new = torch.arange(self.length, self.length + tokens, device=index.device)
            index = torch.cat([index, new.expand(rows, heads, -1)], dim=2)
        if real is not None or self.real is not None:
            real = self._flags(tokens, real)
        return Survivors(facts, index, real, self.length + tokens)

    def best(self, worth: Tensor, counts: list[int]) -> Survivors:
        """Those of the highest ``worth`` ``(B, H_kv, n)``: ``counts`` of each row or of all.

        Columns beyond a row's count repeat its first token.
        """
        if self.real is not None:
            worth = worth.masked_fill(~self.real[:, None], -LAST)
        chosen = worth.topk(max(counts), dim=2).indices
        index, facts = self.positions.gather(2, chosen), _gather(self.facts, chosen)
        if min(counts) == max(counts):
            return Survivors(facts, index, None, self.length)
        order = torch.arange(max(counts), device=index.device)
        real = order < torch.tensor(counts, device=index.device)[:, None]
        index = index.where(real[:, None], index[..., :1])
        return Survivors(facts, index, real, self.length)

    def without_worst(self, worth: Tensor) -> Survivors:
        """All but the one of the least ``worth`` ``(B, H_kv, n)`` in each head; all must be real.

        The newest takes the place of the one that goes.
        """
        index, facts = self.positions, self.facts
        victim = worth.argmin(dim=2, keepdim=True)
        wide = victim.unsqueeze(3).expand(-1, -1, -1, facts.shape[3])
        facts = facts.scatter(2, wide, facts[:, :, -1:])[:, :, :-1]
        index = index.scatter(2, victim, index[..., -1:])[..., :-1]
        return Survivors(facts, index, None, self.length)

    def truncated(self, length: int, visible: Tensor | None) -> Survivors:
        """Those before position ``length``, and in place of the others the newest that are not
        among them, of which nothing is known any more.

        ``visible`` ``(B, *)`` is False for padding.
        """
        if self.index is None:
            real = None if self.real is None else self.real[:, :length]
            return Survivors(self.facts[:, :, :length], None, real, length)
        rows, heads, _, width = self.facts.shape
        place = self.index
        if self.real is not None:
            place = place.where(self.real[:, None], self.length)  # a spare one
        member = place.new_zeros(rows, heads, self.length + 1).scatter_(2, place, 1)
        facts = self.facts.new_zeros(rows, heads, self.length + 1, width)
        facts.scatter_(2, place.unsqueeze(3).expand_as(self.facts), self.facts)
        order = torch.arange(length, device=place.device)
        worth = order + length * member[..., :length].double()
        counts = [min(length, each) for each in self.held()]
        real = None
        if visible is not None:
            real = visible[:, :length].to(place.device)
            counts = [
                min(each)
                for each in zip(self._by_row(counts), real.sum(dim=1).tolist(), strict=True)
            ]
        return Survivors(facts[:, :, :length], None, real, length).best(worth, counts)

    def rows(self, index: Tensor) -> Survivors:
        """The batch rows ``index`` ``(n,)``, repeats allowed."""
        index = index.to(self.facts.device)
        return Survivors(
            self.facts[index],
            None if self.index is None else self.index[index],
            None if self.real is None else self.real[index],
            self.length,
        )

    def _by_row(self, counts: list[int]) -> list[int]:
        return counts * self.facts.shape[0] if len(counts) == 1 else counts

    def _flags(self, tokens: int, real: Tensor | None) -> Tensor:
        rows, device = self.facts.shape[0], self.facts.device
        old, new = (
            torch.ones(rows, count, dtype=torch.bool, device=device) if given is None else given
            for count, given in ((self.columns, self.real), (tokens, real))
        )
        return torch.cat([old, new.to(device)], dim=1)


def _gather(facts: Tensor, columns: Tensor) -> Tensor:
    return facts.gather(2, columns.unsqueeze(3).expand(-1, -1, -1, facts.shape[3]))
