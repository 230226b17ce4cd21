"""Where the tokens of a disk home lie in their file: arithmetic only, no I/O.

A token's entries of all heads lie side by side. Tokens fill *groups* of whole blocks, since
O_DIRECT moves whole blocks only; groups fill *extents*, the unit in which a file is handed out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 4096  # bytes; what O_DIRECT wants of addresses and sizes on every common disk
EXTENT = 256 * 1024  # bytes; one read of this size is nearly as fast as a longer one

# A token across two blocks costs a second block at each random read, padding costs space and
# sequential reads: a group is the smallest that wastes at most this share.
PADDING = 0.25

Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]


class Span(NamedTuple):
    """Groups that lie side by side in the file."""

    offset: int
    """Where they start in the file, bytes."""
    first: int
    """The first group's number in its batch row."""
    groups: int


class Runs(NamedTuple):
    """Positional reads that together fetch a set of tokens, in the order of the file."""

    offsets: Indices
    """``(n,)`` where each starts in the file, a multiple of `BLOCK`."""
    sizes: Indices
    """``(n,)`` bytes of each, a multiple of `BLOCK`."""
    starts: Indices
    """``(n,)`` where each goes in one buffer of ``sizes.sum()`` bytes."""
    places: Indices
    """As the tokens' addresses: where each then starts in that buffer."""

    def pieces(self, longest: int) -> Iterator[tuple[int, int, int]]:
        """Offset, size and start of each read, cut to ``longest`` bytes."""
        for offset, size, start in zip(
            self.offsets.tolist(), self.sizes.tolist(), self.starts.tolist(), strict=True
        ):
            if size <= longest:
                yield offset, size, start
                continue
            for cut in range(0, size, longest):
                yield offset + cut, min(longest, size - cut), start + cut


@dataclass(frozen=True, slots=True)
class Layout:
    """How tokens of one size are laid out; `of` chooses the group.

    Parameters
    ----------
    token_bytes
        Bytes of one token, all heads.
    blocks
        Blocks of one group.
    """

    token_bytes: int
    blocks: int

    @classmethod
    def of(cls, token_bytes: int) -> Layout:
        """The layout of tokens of ``token_bytes``.

        256 bytes lie 16 to a block, 768 bytes 5 (one sixteenth is padding), 2112 bytes 3 to two
        blocks, so that one token of three crosses a block's border.
        """
        blocks = -(-token_bytes // BLOCK)
        while (blocks * BLOCK) % token_bytes > PADDING * blocks * BLOCK:
            blocks += 1
        return cls(token_bytes, blocks)

    @property
    def group_bytes(self) -> int:
        """Bytes of a group, padding included."""
        return self.blocks * BLOCK

    @property
    def group_tokens(self) -> int:
        """Tokens of a group."""
        return self.group_bytes // self.token_bytes

    @property
    def extent_groups(self) -> int:
        """Groups of an extent."""
        return max(1, EXTENT // self.group_bytes)

    @property
    def extent_bytes(self) -> int:
        """Bytes of an extent."""
        return self.extent_groups * self.group_bytes

    @property
    def extent_tokens(self) -> int:
        """Tokens of an extent."""
        return self.extent_groups * self.group_tokens

    def extents(self, tokens: int) -> int:
        """Extents that so many tokens of one batch row take."""
        return -(-tokens // self.extent_tokens)

    def addresses(self, extents: Indices, rows: Indices, tokens: Indices) -> Indices:
        """Where tokens start in the file; ``rows``, their batch rows, broadcast to ``tokens``.

        ``extents`` ``(B, X)`` are the starts of each batch row's extents.
        """
        group = tokens // self.group_tokens
        extent = group // self.extent_groups
        padding = self.group_bytes - self.group_tokens * self.token_bytes
        side_by_side = tokens * self.token_bytes + group * padding
        starts = extents.take(extent + rows * extents.shape[1])
        return side_by_side - extent * self.extent_bytes + starts

    def spans(self, extents: Indices, first: int, groups: int) -> Iterator[Span]:
        """The groups from ``first`` on, cut where an extent of ``extents`` ``(X,)`` ends."""
        end = first + groups
        while first < end:
            extent, inside = divmod(first, self.extent_groups)
            count = min(self.extent_groups - inside, end - first)
            yield Span(int(extents[extent]) + inside * self.group_bytes, first, count)
            first += count

    def tokens(self, groups: Bytes) -> Bytes:
        """The tokens of groups ``(..., group_bytes)`` without the padding, sharing memory:
        ``(..., group_tokens, token_bytes)``.
        """
        used = groups[..., : self.group_tokens * self.token_bytes]
        return used.reshape(*groups.shape[:-1], self.group_tokens, self.token_bytes)

    def coalesce(self, addresses: Indices, gap: int) -> Runs:
        """Reads of whole blocks for the tokens at ``addresses``, of any shape, repeats allowed.

        Neighbours in the file share a read where their blocks touch or at most ``gap`` blocks,
        read in vain, lie between them.
        """
        if addresses.size == 0:
            none = np.empty(0, dtype=np.int64)
            return Runs(none, none, none, addresses)
        ordered = np.sort(addresses, axis=None)
        first = ordered // BLOCK
        last = (ordered + (self.token_bytes - 1)) // BLOCK
        apart = (first[1:] - last[:-1] > gap + 1).nonzero()[0]
        runs = len(apart) + 1
        offsets, ends = np.empty(runs, dtype=np.int64), np.empty(runs, dtype=np.int64)
        offsets[0], offsets[1:] = first[0], first[apart + 1]
        ends[:-1], ends[-1] = last[apart], last[-1]
        sizes = (ends + 1 - offsets) * BLOCK
        offsets *= BLOCK
        starts = sizes.cumsum() - sizes
        run = offsets.searchsorted(addresses, side="right") - 1
        return Runs(offsets, sizes, starts, addresses + (starts - offsets)[run])


def entries_at(buffer: Bytes, places: Indices, entry_bytes: int) -> Bytes:
    """The entries that start at ``places`` ``(...)`` of a buffer: ``(..., E)``.

    As items of one opaque type: an entry is copied in one piece, from any address.
    """
    count = max(0, len(buffer) - entry_bytes + 1)
    items: NDArray[np.void] = np.ndarray(
        (count,), dtype=f"V{entry_bytes}", buffer=buffer.data, strides=(1,)
    )
    return items[places.reshape(-1)].view(np.uint8).reshape(*places.shape, entry_bytes)
