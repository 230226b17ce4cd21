"""A request's place in a batch, and the checks of what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infinigen_kv.errors import CacheStateError, InputError
from infinigen_kv.models.soundness import check_known

if TYPE_CHECKING:
    from infinigen_kv.cache.cache import InfiniGenCache

TokenIds = Tensor | Sequence[int]


class Row:
    """A request's place in a batch, from `InfiniGenBatch.join` until `InfiniGenBatch.release`.

    Attributes
    ----------
    place
        Number of the row, below the batch's ``rows``.
    tokens
        Tokens that it may hold.
    logits
        Of its last token, ``(V,)``.
    """

    def __init__(self, place: int, tokens: int, cache: InfiniGenCache, logits: Tensor) -> None:
        self.place = place
        self.tokens = tokens
        self.logits = logits
        self._cache: InfiniGenCache | None = cache

    @property
    def is_released(self) -> bool:
        """Whether it has left its batch."""
        return self._cache is None

    @property
    def cache(self) -> InfiniGenCache:
        """Its KV, statistics and recorder; not to be fed but by the batch."""
        if self._cache is None:
            raise CacheStateError(f"row {self.place} was released: join the request again")
        return self._cache

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.cache.get_seq_length()

    def leave(self) -> InfiniGenCache:
        """For the batch: the cache, of which the row lets go."""
        cache, self._cache = self.cache, None
        return cache


def as_token_ids(given: TokenIds, model: PreTrainedModel) -> Tensor:
    """Token ids ``(n,)`` int64 that the model has embeddings of; checked.

    Raises
    ------
    InputError
        If they are no integers ``(n,)`` or ``(1, n)`` in that range.
    """
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError) as error:
        raise InputError(f"token ids are not valid: they must be integers ({error})") from error
    integers = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    one_row = ids.dim() == 1 or (ids.dim() == 2 and ids.shape[0] == 1)
    if ids.numel() and not (integers and one_row):
        raise InputError(
            f"token ids of shape {tuple(ids.shape)} and type {ids.dtype} are not valid: they must "
            "be integers, for one row (T,) or (1, T)"
        )
    ids = ids.reshape(-1).long()
    check_known(ids, model)
    return ids
