"""What a session's hooks call while the model runs: the contract of every cache of this package."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from torch import Tensor
from transformers.cache_utils import Cache

CACHE_NAMES = ("cache", "past_key_values", "layer_past")  # in a forward, by release and family


class Owner(Protocol):
    """What a cache was made by, and works with: a session."""

    closed: bool


class Attending(Protocol):
    """A layer of a cache that computes its attention itself."""

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        *,
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        """Store the new tokens and attend; shapes as in `attention.dense.dense_attention`.

        ``keys`` and ``values`` are those of the new tokens.
        """


class EngineCache(Cache):
    """A Transformers cache that is told when a forward starts, reaches a layer, and ends.

    A base class, and not a protocol, because every layer of every forward asks for it.
    """

    owner: Owner

    @abstractmethod
    def begin_forward(
        self, *, queries: int, rows: int, attention_mask: Tensor | None, position_ids: Tensor
    ) -> None:
        """The model starts a forward of ``queries`` new tokens in ``rows`` rows."""

    @abstractmethod
    def attention_input(self, index: int, hidden: Tensor) -> Attending | None:
        """Layer ``index`` is about to attend to ``hidden`` ``(B, Q, M)``.

        Returns who computes its attention; None for the model's own way.
        """

    @abstractmethod
    def end_forward(self, *, finished: bool) -> None:
        """The forward is over; it failed unless ``finished``."""
