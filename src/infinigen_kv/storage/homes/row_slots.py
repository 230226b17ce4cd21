"""The slots of all rows of a limited pool, as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from infinigen_kv.storage.homes.slots import Eviction, SlotMap


class RowSlots:
    """A `SlotMap` for each row of a batch; the rows get their tokens together.

    Parameters
    ----------
    rows
        B.
    capacity, eviction, sinks
        As for `SlotMap`, the same for every row.
    """

    def __init__(self, rows: int, capacity: int, eviction: Eviction, *, sinks: int = 0) -> None:
        self.capacity = capacity
        self._maps = [SlotMap(capacity, eviction, sinks=sinks) for _ in range(rows)]

    @property
    def tokens_seen(self) -> int:
        """Tokens added so far, evicted ones included."""
        return self._maps[0].tokens_seen

    @property
    def free(self) -> int:
        """Tokens that fit before any is evicted."""
        return self.capacity - self._maps[0].length

    @property
    def sinks(self) -> int:
        """First real tokens of each row that are never evicted."""
        return self._maps[0].sinks

    @property
    def positions(self) -> Tensor | None:
        """Position of the token in each slot, ``(B, S)`` int64; None while each is at its own."""
        if self.tokens_seen == self._maps[0].length:
            return None
        return torch.from_numpy(np.stack([each.positions for each in self._maps]))

    def set_padding(self, padding: Sequence[int]) -> None:
        """Tokens before each row's first real one; to be set before that one is added."""
        for slot_map, tokens in zip(self._maps, padding, strict=True):
            slot_map.padding = tokens

    def add(self, count: int) -> Tensor:
        """Slots of the next ``count`` tokens, ``(B, count)``; -1 where one is dropped at once."""
        return torch.from_numpy(np.stack([each.add(count) for each in self._maps]))

    def touch(
        self, slots: Tensor, valid: Tensor | None, rows: Sequence[bool] | None = None
    ) -> None:
        """Note that a step fetched ``slots`` ``(B, H_kv, n)``.

        ``valid`` ``(B, 1 or H_kv, n)`` says which of the columns count; None for all. Only in
        ``rows``, where they are given.
        """
        for row, slot_map in enumerate(self._maps):
            if rows is not None and not rows[row]:
                continue
            wanted = slots[row] if valid is None else slots[row][valid[row].expand_as(slots[row])]
            slot_map.touch(wanted.reshape(-1).cpu().numpy())

    def remember(self) -> None:
        """A prompt begins or has ended; see `SlotMap.remember`."""
        for each in self._maps:
            each.remember()

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on; see `SlotMap.truncate`."""
        for each in self._maps:
            each.truncate(length)

    def take_rows(self, index: Tensor) -> None:
        """Become the rows ``index`` ``(n,)``."""
        self._maps = [self._maps[row].copy() for row in index.tolist()]
