"""The interface of a decode step's arithmetic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from infinigen_kv.attention.dense import decode_attention
from infinigen_kv.attention.entries import Entries
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.select import Candidates, Selection
from infinigen_kv.rehearsal.tail import Tail
from infinigen_kv.storage.pools.resident import ResidentSet

AddLowRank = Callable[[Tensor, Tensor], Tensor]
"""``(projected (B, Q, N), inputs (B, Q, M)) -> (B, Q, N)``; may overwrite ``projected``."""


class Kernels(ABC):
    """What one decode step computes apart from the model itself; one query per row."""

    name: str
    resident_set: type[ResidentSet] = ResidentSet

    def __deepcopy__(self, memo: dict[int, Any]) -> Kernels:
        """Another one, since a copied cache may be used in another thread."""
        return type(self)()

    @abstractmethod
    def select(
        self,
        query: Tensor,
        keys: PartialKeys,
        candidates: Candidates,
        *,
        scaling: float,
        alpha: float,
        softcap: float | None,
    ) -> Selection:
        """Score all tokens and select: `rehearsal.select.select_tokens`.

        Parameters
        ----------
        query
            Predicted, ``(B, H, 1, D)``.
        keys
            The partial keys.
        candidates
            What may and what must be chosen.
        alpha, scaling, softcap
            As in `select` and `attention.dense.decode_attention`.

        Raises
        ------
        InfiniGenError
            Where a score is NaN or infinite.
        """

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        entries: Entries,
        counts: Tensor | None,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        softcap: float | None,
        weighed: bool = False,
        tail: Tail | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention over entries and each query's own token.

        Parameters
        ----------
        query
            ``(B, H, 1, D)``.
        entries, counts
            What was moved; ``counts`` ``(B, 1)`` says how many of its leading columns are valid in
            each row, None for all.
        keys, values
            Of the own token, ``(B, H_kv, 1, D)``.
        weighed
            Also return the probabilities.
        tail
            What stands for the other tokens, see `rehearsal.tail`; not together with ``weighed``.

        Returns
        -------
        output
            ``(B, 1, H, D_v)``.
        weights
            ``(B, H_kv, n + 1)`` float32: probabilities summed over a group's queries, the own
            token's last; None unless ``weighed``.
        """

    def attend_all(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        """As `attention.dense.decode_attention`, over all tokens, the own one last."""
        return decode_attention(query, keys, values, scaling=scaling, softcap=softcap, visible=mask)

    def append(self, partial: PartialKeys, keys: Tensor) -> None:
        """Add the partial keys of one new token per row, ``keys`` ``(B, H_kv, 1, D)``."""
        partial.append(keys)

    def low_rank(self, down: Tensor, bias: Tensor, up: Tensor) -> AddLowRank:
        """What adds ``(x down^T + bias) up`` to a projection of ``x``.

        ``down`` is ``(r, M)``, ``bias`` ``(r,)`` and ``up`` ``(r, N)``, all contiguous.
        """

        def add(projected: Tensor, inputs: Tensor) -> Tensor:
            return projected + F.linear(inputs, down, bias) @ up

        return add
