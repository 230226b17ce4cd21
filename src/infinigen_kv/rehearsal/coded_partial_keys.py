"""Partial keys of which all but the newest tokens are codes of few bits."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

import torch
from torch import Tensor

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import InputError
from infinigen_kv.rehearsal.codes import GROUP, CodeLayout, decode, encode
from infinigen_kv.rehearsal.partial_keys import (
    GROWTH,
    SPARE_TOKENS,
    TOKENS_AT_ONCE,
    PartialKeys,
    writable,
)
from infinigen_kv.rehearsal.projection import Projection
from infinigen_kv.rehearsal.recent import MIN_WAITING as HELD
from infinigen_kv.rehearsal.statistics import Moments

RECENT = GROUP + HELD  # tokens in full precision at most, as long as they come one by one


class CodedPartialKeys(PartialKeys):
    """As `PartialKeys`, in full groups of 64 tokens as codes (`rehearsal.codes`).

    ``storage`` ``(B, H_kv, R, room)`` has only the tokens after the first ``coded`` ones, in full
    precision. The newest 32 always wait there, as they wait to be summed (`rehearsal.recent`):
    drafts are taken back, and what comes instead must not find them in a group's grid.

    Fitting anew changes how codes are read and not the codes (`refitted`): each coding of what was
    coded before would lose as much as the first one.

    Parameters
    ----------
    keys
        ``(B, H_kv, T, D)``.
    projection
        Of these rows.
    layout
        Its rank is the projection's.
    settled
        See `settle`; None for all tokens.
    """

    def __init__(
        self,
        keys: Tensor,
        projection: Projection,
        layout: CodeLayout,
        *,
        settled: int | None = None,
    ) -> None:
        rows, heads, tokens, _ = keys.shape
        assert layout.rank == projection.key.shape[3]
        self.projection, self.layout = projection, layout
        self.compiled = None
        self.length = self.coded = 0
        groups = (tokens + SPARE_TOKENS) // GROUP
        self.codes = writable((rows, heads, groups, layout.line), keys, torch.uint8)
        self.grids = writable((rows, heads, groups, 2, layout.rank), keys, torch.bfloat16)
        end = coded_tokens(tokens if settled is None else settled)
        for start in range(0, end, TOKENS_AT_ONCE):
            block = keys[:, :, start : min(end, start + TOKENS_AT_ONCE)]
            self._code(projection.partial_keys(block).mT)
        self.length = end
        room = max(RECENT, tokens - end)
        self.storage = writable((rows, heads, layout.rank, room), keys)
        self.append(keys[:, :, end:])

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.grids.nbytes + self.storage.nbytes

    @property
    def capacity(self) -> int:
        return self.codes.shape[2] * GROUP

    def reserve(self, tokens: int) -> None:
        if tokens > self.capacity:
            groups = max(-(-tokens // GROUP), int(self.codes.shape[2] * GROWTH))
            self.codes = _grown(self.codes, groups, self.coded // GROUP)
            self.grids = _grown(self.grids, groups, self.coded // GROUP)

    def settle(self, length: int) -> None:
        end = coded_tokens(min(length, self.length))
        if end <= self.coded:
            return
        full = end - self.coded
        recent = self.storage[..., : self.length - self.coded]
        self._code(recent[..., :full])
        self._hold(recent[..., full:])

    def steady_for(self, length: int) -> int:
        return max(self.coded, coded_tokens(length)) + RECENT - length

    def view(self) -> Tensor:
        """A copy, of the storage's dtype."""
        blocks = [block.to(self.storage.dtype) for _, block in self._blocks()]
        return torch.cat(blocks, dim=-1).mT

    def products(self, query: Tensor) -> Tensor:
        return torch.cat([query @ block for _, block in self._blocks()], dim=-1)

    def weighted(self, weights: Tensor) -> Tensor:
        sums = weights.new_zeros(*weights.shape[:3], self.layout.rank)
        for start, block in self._blocks():
            sums += weights[..., start : start + block.shape[3]] @ block.mT
        return sums

    def refitted(self, moments: Moments, keep: Tensor) -> CodedPartialKeys:
        """With the query's side of the projection that ``moments`` suggest for these dimensions.

        For a key's side C the best query's side is the one with which ``q B z`` is the score of the
        key as it is guessed from z (`guesses`). So no code changes.
        """
        old = self.projection
        assert old.offset is not None
        guess, mean = self.guesses(moments), moments.key_mean
        level = mean - (mean - old.offset) @ old.key @ guess
        new = copy(self)
        new.projection = Projection(
            guess.mT.contiguous(), old.key, old.offset, level.contiguous()
        ).with_rows(keep, old)
        return new

    def keep_rows(self, keep: Tensor, old: PartialKeys) -> None:
        """As far as both are coded, and both not: what lies between was made by the same projection
        of keys that a codec may have touched since.
        """
        assert isinstance(old, CodedPartialKeys)
        groups = min(self.coded, old.coded) // GROUP
        self.codes[keep, :, :groups] = old.codes[keep, :, :groups]
        self.grids[keep, :, :groups] = old.grids[keep, :, :groups]
        start, end = max(self.coded, old.coded), min(self.length, old.length)
        if start < end:
            mine = slice(start - self.coded, end - self.coded)
            theirs = slice(start - old.coded, end - old.coded)
            self.storage[keep, ..., mine] = old.storage[keep, ..., theirs]

    def truncate(self, length: int) -> None:
        super().truncate(length)
        if self.length >= self.coded:
            return
        first = self.length // GROUP
        group = slice(first, first + 1)
        numbers = decode(self.codes[:, :, group], self.grids[:, :, group], self.layout)
        self.coded = first * GROUP
        self._hold(numbers[..., : self.length - self.coded])

    def take_rows(self, index: Tensor) -> None:
        super().take_rows(index)
        index = index.to(self.codes.device)
        for name in ("codes", "grids"):
            kept = getattr(self, name)[index]
            setattr(self, name, writable(tuple(kept.shape), kept).copy_(kept))

    def _code(self, numbers: Tensor) -> None:
        """Add full groups ``(B, H_kv, R, n * 64)`` to the codes."""
        start, end = self.coded, self.coded + numbers.shape[3]
        self.reserve(end)
        groups = slice(start // GROUP, end // GROUP)
        self.codes[:, :, groups], self.grids[:, :, groups] = encode(numbers, self.layout)
        self.coded = end

    def _hold(self, numbers: Tensor) -> None:
        """Keep the numbers of the tokens that are not coded, ``(B, H_kv, R, n)``.

        In new memory: a copy of this object still reads the old one.
        """
        count = numbers.shape[3]
        held = writable((*numbers.shape[:3], max(RECENT, count)), self.storage)
        held[..., :count] = numbers
        self.storage = held

    def _blocks(self) -> Iterator[tuple[int, Tensor]]:
        """First token and float32 numbers ``(B, H_kv, R, n)``, block after block."""
        for start in range(0, self.coded, TOKENS_AT_ONCE):
            groups = slice(start // GROUP, min(self.coded, start + TOKENS_AT_ONCE) // GROUP)
            yield start, decode(self.codes[:, :, groups], self.grids[:, :, groups], self.layout)
        yield self.coded, self.storage[..., : self.length - self.coded].float()


def make_partial_keys(
    config: InfiniGenConfig,
    keys: Tensor,
    projection: Projection,
    visible: Tensor | None = None,
    settled: int | None = None,
    slots: Tensor | None = None,
) -> PartialKeys:
    """Partial keys of ``keys`` as the settings want them.

    Parameters
    ----------
    keys, projection
        As for `PartialKeys`.
    visible
        ``(B, T)`` boolean, False for padding; None where there is none.
    settled
        As for `CodedPartialKeys`.
    slots
        ``(B, T)`` places of the keys in a pool that has dropped some, see `PartialKeys.write`; None
        for their order.

    Raises
    ------
    InputError
        For coded ones of padded rows.
    """
    if config.index_bits is None:
        partial = PartialKeys(keys, projection, empty=slots is not None)
        if slots is not None:
            partial.write(slots, keys)
        return partial
    if visible is not None:
        raise InputError(
            f"index_bits={config.index_bits!r} is not valid for padded rows, whose groups of "
            "tokens are not those of the row alone: use InfiniGenBatch, or leave index_bits out"
        )
    assert slots is None  # a home with a capacity is refused
    layout = CodeLayout.of(config.index_widths)
    return CodedPartialKeys(keys, projection, layout, settled=settled)


def coded_tokens(length: int) -> int:
    """How many of the first ``length`` tokens are coded by then."""
    return max(0, length - HELD) // GROUP * GROUP


def _grown(held: Tensor, groups: int, used: int) -> Tensor:
    grown = writable((*held.shape[:2], groups, *held.shape[3:]), held)
    grown[:, :, :used] = held[:, :, :used]
    return grown
