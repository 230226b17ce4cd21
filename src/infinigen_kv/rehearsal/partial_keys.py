"""Partial keys of one layer: what the rehearsal scores, kept on the device."""

from __future__ import annotations

import sys
from copy import copy
from typing import Any

import torch
from torch import Tensor

from infinigen_kv.rehearsal.projection import Projection
from infinigen_kv.rehearsal.statistics import Moments

NEVER = sys.maxsize  # tokens
GROWTH = 1.5
SPARE_TOKENS = 512  # room for appends before the storage has to grow
TOKENS_AT_ONCE = 4096  # of which there are float32 copies at a time
MIN_VARIANCE = 1e-30  # of a variance, where keys do not vary at all
GUESSED_WEIGHT = 0.7  # weight of guessed keys against true ones in the choice of a new projection
MIN_SPREAD = 1e-5  # of the largest variance: less is not told from the rounding of the sums


class PartialKeys:
    """Partial keys ``k C`` and the projection that made them.

    ``storage`` is ``(B, H_kv, R, capacity)``, tokens last: all scores of one head are then sums of
    whole lines, which vector instructions read sixteen tokens at a time.

    Parameters
    ----------
    keys
        ``(B, H_kv, T, D)``.
    projection
        Of these rows.
    empty
        Only make room for the keys; `write` puts them in their slots.
    """

    def __init__(self, keys: Tensor, projection: Projection, *, empty: bool = False) -> None:
        rows, heads, tokens, _ = keys.shape
        self.projection = projection
        self.length = 0
        self.coded = 0  # the oldest of them, which `storage` does not have
        self.compiled: Any = None  # kept by compiled kernels, see `kernels.native.constants`
        shape = rows, heads, projection.key.shape[-1], tokens + SPARE_TOKENS
        self.storage = writable(shape, keys)
        if not empty:
            self.append(keys)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self.storage.nbytes

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.storage.shape[3]

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens, and for more to come."""
        self._reserve(tokens)

    def settle(self, length: int) -> None:
        """Code what can be coded once there are ``length`` tokens, at most those that there are."""

    def steady_for(self, length: int) -> int:
        """Tokens that may come on top of ``length`` before some are coded."""
        return NEVER

    def view(self) -> Tensor:
        """The partial keys so far, ``(B, H_kv, T, R)``, sharing memory."""
        return self.storage[..., : self.length].mT

    def append(self, keys: Tensor) -> None:
        """Add the keys ``(B, H_kv, Q, D)`` of new tokens."""
        start, tokens = self.extend(keys.shape[2]), keys.shape[2]
        self.storage[..., start : start + tokens] = self.projection.partial_keys(keys).mT

    def extend(self, tokens: int) -> int:
        """Add places that are yet to be written, and return the first one, in ``storage``."""
        start = self.length - self.coded
        if start + tokens > self.storage.shape[3]:
            self._reserve(start + tokens)
        self.length += tokens
        return start

    def write(self, slots: Tensor, keys: Tensor) -> None:
        """Put partial keys of ``keys`` ``(B, H_kv, Q, D)`` at ``slots`` ``(B, Q)``.

        New slots follow those in use; -1 is skipped.
        """
        needed = int(slots.max()) + 1
        self._reserve(needed)
        self.length = max(self.length, needed)
        partial = self.projection.partial_keys(keys).mT
        for row in range(slots.shape[0]):
            used = slots[row] >= 0
            places = slots[row][used].to(self.storage.device)
            self.storage[row].index_copy_(2, places, partial[row][..., used])

    def scores(
        self, query: Tensor, scaling: float, softcap: float | None, *, absolute: bool = False
    ) -> Tensor:
        """Rehearsed scores ``(B, H_kv, G, Q, T)`` float32 of a query ``(B, H, Q, D)``.

        Unless their ``absolute`` height is needed, as it is with a soft cap, they lack what the
        keys' offset adds to all scores of a query.
        """
        rows, heads, queries, dim = query.shape
        projection, kv_heads = self.projection, self.storage.shape[1]
        grouped = query.reshape(rows, kv_heads, -1, dim).float() * scaling  # (B, H_kv, G * Q, D)
        scores = self.products(grouped @ projection.query)
        if projection.height is not None and (absolute or softcap is not None):
            scores = scores + grouped @ projection.height.mT
        if softcap is not None:
            odd = scores.isinf()  # a cap would hide it
            scores = (torch.tanh(scores / softcap) * softcap).masked_fill(odd, float("nan"))
        return scores.view(rows, kv_heads, heads // kv_heads, queries, self.length)

    def products(self, query: Tensor) -> Tensor:
        """``(B, H_kv, n, T)`` float32 of projected queries ``(B, H_kv, n, R)`` float32."""
        return query @ self.storage[..., : self.length].float()

    def weighted(self, weights: Tensor) -> Tensor:
        """Sums ``(B, H_kv, n, R)`` of the partial keys times ``weights`` ``(B, H_kv, n, T)``."""
        return weights @ self.view().float()

    def guesses(self, moments: Moments) -> Tensor:
        """W ``(B, H_kv, R, D)``: a key is guessed from its partial key z as mean + (z - mean z) W.

        By least squares over all tokens of ``moments``. Every direction of the keys counts as
        varying a little: for fewer directions than R the guess would follow rounding errors, which
        grow with each turn.
        """
        scatter = moments.key_scatter.double()
        largest = scatter.diagonal(dim1=-2, dim2=-1).amax(dim=-1)[..., None, None]
        least = MIN_SPREAD * largest + MIN_VARIANCE
        scatter = scatter + least * torch.eye(scatter.shape[-1]).to(scatter)
        known = self.projection.key.mT.double() @ scatter
        return torch.linalg.solve(known @ self.projection.key.double(), known).float()

    def refitted(self, moments: Moments, keep: Tensor) -> PartialKeys:
        """With the projection that ``moments`` suggest, as far as these partial keys tell.

        The guess of each key (`guesses`) is projected, which is one affine map of z, so that no key
        has to be moved. What cannot be guessed is lost on tokens of the past and useful for those
        to come: the projection is best for a mixture of guessed and true keys.

        Parameters
        ----------
        moments
            Of the queries and keys.
        keep
            ``(B,)`` rows whose projection and partial keys stay as they are.
        """
        old, guess, scatter = self.projection, self.guesses(moments), moments.key_scatter
        guessed = guess.mT @ (old.key.mT @ scatter @ old.key) @ guess
        mixture = GUESSED_WEIGHT * guessed + (1 - GUESSED_WEIGHT) * scatter
        new = moments.projection(old.key.shape[3], mixture).with_rows(keep, old)
        return self.recoded(new, moments, guess, keep)

    def recoded(
        self, projection: Projection, moments: Moments, guess: Tensor, keep: Tensor
    ) -> PartialKeys:
        """What ``projection`` makes of the guessed keys (`guesses`), but for the rows in ``keep``
        ``(B,)``, of which it is the old one.
        """
        assert self.projection.offset is not None and projection.offset is not None
        mean = moments.key_mean
        turn = guess @ projection.key
        constant = (mean - projection.offset) @ projection.key
        constant = constant - (mean - self.projection.offset) @ self.projection.key @ turn
        new = copy(self)
        new.projection = projection
        new.storage = writable(tuple(self.storage.shape), self.storage)
        pick = keep[:, None, None, None]
        for start in range(0, self.length, TOKENS_AT_ONCE):
            block = slice(start, min(start + TOKENS_AT_ONCE, self.length))
            held = self.storage[..., block]
            coded = (turn.mT @ held.float() + constant.mT).to(held.dtype)
            new.storage[..., block] = torch.where(pick, held, coded)
        return new

    def keep_rows(self, keep: Tensor, old: PartialKeys) -> None:
        """Take over what ``old`` holds in the rows marked in ``keep`` ``(B,)``.

        If `recoded`, that is not what the projection makes of the keys.
        """
        held = min(self.length, old.length)
        self.storage[keep, ..., :held] = old.storage[keep, ..., :held]

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on; more than there are forgets none."""
        self.length = max(0, min(self.length, length))

    def take_rows(self, index: Tensor) -> None:
        """Become the batch rows ``index`` ``(n,)``, repeats allowed."""
        index = index.to(self.storage.device)
        self.projection = self.projection.rows(index)
        kept = self.storage[index]
        self.storage = writable(tuple(kept.shape), kept)
        self.storage.copy_(kept)

    def _reserve(self, tokens: int) -> None:
        capacity = self.storage.shape[3]
        if tokens > capacity:
            shape = *self.storage.shape[:3], max(tokens, int(capacity * GROWTH))
            grown = writable(shape, self.storage)
            used = self.length - self.coded
            grown[..., :used] = self.storage[..., :used]
            self.storage = grown


def writable(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised memory that may be written to outside of `torch.inference_mode` too."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
