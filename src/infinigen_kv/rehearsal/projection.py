"""From keys to partial keys: what a rehearsal chose from a prompt's sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOKEN_BLOCK = 512  # tokens in float32 at once: bounds what a long prompt needs, and stays in caches


@dataclass(slots=True)
class Projection:
    """B, C ``(B, H_kv, D, R)`` and the key offset ``(B, H_kv, 1, D)`` or None, float32.

    ``level`` is what scores have in the offset's place where B was fitted anew and C was not.
    """

    query: Tensor
    key: Tensor
    offset: Tensor | None
    level: Tensor | None = None

    @property
    def height(self) -> Tensor | None:
        """What a score has beside the partial keys' part: the query times this."""
        return self.offset if self.level is None else self.level

    def partial_keys(self, keys: Tensor) -> Tensor:
        """``(B, H_kv, T, D)`` keys to ``(B, H_kv, T, R)`` partial keys of the same dtype."""
        if keys.shape[2] <= TOKEN_BLOCK:
            return self._project(keys)
        partial = keys.new_empty(*keys.shape[:3], self.key.shape[3])
        for start in range(0, keys.shape[2], TOKEN_BLOCK):
            block = slice(start, start + TOKEN_BLOCK)
            partial[:, :, block] = self._project(keys[:, :, block])
        return partial

    def _project(self, keys: Tensor) -> Tensor:
        centred = keys.float() if self.offset is None else keys.float() - self.offset
        return (centred @ self.key).to(keys.dtype)

    def rows(self, index: Tensor) -> Projection:
        """The projections of the batch rows ``index``."""
        offset = None if self.offset is None else self.offset[index]
        level = None if self.level is None else self.level[index]
        return Projection(self.query[index], self.key[index], offset, level)

    def with_rows(self, keep: Tensor, old: Projection) -> Projection:
        """This projection, but ``old``'s for the rows marked in ``keep`` ``(B,)``."""
        pick = keep[:, None, None, None]
        offset = level = None
        if self.offset is not None and old.offset is not None:
            offset = torch.where(pick, old.offset, self.offset)
        if self.level is not None or old.level is not None:
            assert self.height is not None and old.height is not None
            level = torch.where(pick, old.height, self.height)
        query, key = torch.where(pick, old.query, self.query), torch.where(pick, old.key, self.key)
        return Projection(query, key, offset, level)
