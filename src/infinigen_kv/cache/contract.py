"""What a session's hooks call while the model runs: the contract of every cache of this package."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from infinigen_kv.errors import CacheStateError
from infinigen_kv.models.adapters.base import Adapter

CACHE_NAMES = ("cache", "past_key_values", "layer_past")  # in a forward, by release and family

Function = TypeVar("Function", bound=Callable[..., Any])


def opaque(function: Function) -> Function:
    """Decorate what a model calls while it runs: `torch.compile` is to run it as it is.

    A compiler that looked inside would trace threads, counters and compiled kernels, and compile
    anew for every length of the text.
    """
    hidden: Function = torch.compiler.disable(function)
    return hidden


class ProcessBound:
    """What holds a session's memory, threads and files, and so cannot leave its process."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise `CacheStateError`; pickle, `torch.save` and `copy.copy` call it."""
        raise CacheStateError(
            f"{type(self).__name__} cannot be pickled, saved or copied flat, since its memory, "
            "threads and files belong to a session of this process: copy.deepcopy(cache) copies a "
            "cache, and another process has to attach the model and read the prompt itself"
        )


class Owner(Protocol):
    """What a cache was made by, and works with: a session, a model while it is attached."""

    model: PreTrainedModel
    adapter: Adapter
    closed: bool

    def check_length(self, tokens: int) -> None:
        """Raise `InputError` if the model has fewer positions than ``tokens``."""


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


class EngineCache(ProcessBound, Cache):
    """A Transformers cache that is told when a forward starts, reaches a layer, and ends.

    A base class, and not a protocol, because every layer of every forward asks for it.
    """

    owner: Owner
    earlier_pieces: Sequence[Any] = ()
    """Outputs of the pieces of a forward whose last one is under way; see `session.pieces`."""

    def tokens_of_piece(self, queries: int) -> int:
        """How many of the next ``queries`` tokens one forward may read, at least 1."""
        return queries

    def expect_verification(self, tokens: int, drafts: int) -> None:
        """The next forward reads ``tokens`` tokens, the last ``drafts`` of which are drafts."""

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
