"""Running sums over a prompt from which a rehearsal chooses its partial dimensions.

Both kinds give the same thing, a `Projection`: the rehearsal's score of a token is
``(q B) ((k - offset) C)^T``. They accept any split of the prompt into chunks and any padding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from infinigen_kv.errors import InfiniGenError
from infinigen_kv.rehearsal.lowrank import best_projections
from infinigen_kv.rehearsal.projection import TOKEN_BLOCK, Projection
from infinigen_kv.rehearsal.skew import partial_columns, take_columns
from infinigen_kv.rehearsal.value_moments import ValueMoments

# Queries weigh with the cube of their position, because the late ones resemble those of the decode
# phase most. A power has no reference to the prompt's length, which chunked prefill cannot know.
POSITION_POWER = 3
POSITION_UNIT = 4096.0  # keeps the weights near 1; any common factor cancels


class PromptStatistics(ABC):
    """Sums over tokens of a layer: a prompt's, and, where it is fitted anew, those that follow."""

    @torch.inference_mode(False)  # sums may go on outside of it
    @torch.no_grad()
    def observe(
        self,
        query: Tensor,
        key: Tensor,
        position: Tensor,
        weight: Tensor | None,
        value: Tensor | None = None,
    ) -> None:
        """Add tokens.

        Parameters
        ----------
        query, key
            ``(B, H, Q, D)`` and ``(B, H_kv, Q, D)`` as the attention uses them (after RoPE).
        position
            ``(B, Q)`` or ``(1, Q)`` number of real tokens before each, in its row.
        weight
            ``(B, Q)`` 0 for tokens that do not count (padding), or None.
        value
            ``(B, H_kv, Q, D_v)``, for sums that were started with values.
        """
        for block in _blocks(key):
            self._add_queries(query[:, :, block], position[:, block], _column(weight, key, block))
        self.observe_keys(key, weight, value)

    @torch.inference_mode(False)
    @torch.no_grad()
    def observe_keys(self, key: Tensor, weight: Tensor | None, value: Tensor | None) -> None:
        """As `observe`, for tokens whose queries are among the sums already (`restarted`)."""
        for block in _blocks(key):
            weights = _column(weight, key, block)
            self._add_keys(key[:, :, block], weights, None if value is None else value[:, :, block])

    @abstractmethod
    def _add_queries(self, query: Tensor, position: Tensor, weights: Tensor) -> None:
        """The queries of at most `TOKEN_BLOCK` tokens; ``weights`` are ``(B, 1, Q, 1)``."""

    @abstractmethod
    def _add_keys(self, key: Tensor, weights: Tensor, value: Tensor | None) -> None:
        """Their keys, and values."""

    @property
    @abstractmethod
    def query_sums(self) -> Tensor:
        """What the queries have added, ``(B, H_kv, n)``; the rest follows from keys and values."""

    @abstractmethod
    def restarted(self, query_sums: Tensor) -> PromptStatistics:
        """Sums with these of the queries, and yet of no key."""

    @staticmethod
    @abstractmethod
    def query_weight(tokens: Tensor) -> Tensor:
        """What the first ``tokens`` of a row weigh together among its queries, float64."""

    @abstractmethod
    def projection(self, rank: int) -> Projection:
        """The rank-R score that these tokens suggest."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the sums are."""

    @abstractmethod
    def rows(self, index: Tensor) -> PromptStatistics:
        """The sums of the batch rows ``index`` ``(n,)``."""


@dataclass(slots=True)
class Moments(PromptStatistics):
    """Second moments of queries and centred keys: the calibrated rehearsal (`best_projections`).

    Keys are summed about ``shift``, the mean of a row's first chunk that is not all padding,
    because subtracting two large sums would cost the precision of models with a big constant key
    offset.
    """

    shift: Tensor  # (B, H_kv, 1, D)
    query_outer: Tensor  # (B, H_kv, D, D)
    key_outer: Tensor  # (B, H_kv, D, D)
    key_sum: Tensor  # (B, H_kv, 1, D)
    count: Tensor  # (B, 1, 1, 1)
    values: ValueMoments | None = None

    @classmethod
    def start(cls, key: Tensor, value: Tensor | None = None) -> Moments:
        """Empty sums for keys like ``key`` ``(B, H_kv, Q, D)``, and for values like ``value``."""
        batch, heads, _, dim = key.shape
        square = torch.zeros(batch, heads, dim, dim, device=key.device)
        row = torch.zeros(batch, heads, 1, dim, device=key.device)
        count = torch.zeros(batch, 1, 1, 1, device=key.device)
        values = None if value is None else ValueMoments.start(key, value)
        return cls(row, square, square.clone(), row.clone(), count, values)

    def _add_queries(self, query: Tensor, position: Tensor, weights: Tensor) -> None:
        rows, _, tokens, dim = query.shape
        late = ((position.float() + 1) / POSITION_UNIT) ** POSITION_POWER
        late = late[:, None, None, :, None] * weights[:, :, None]
        queries = query.float().reshape(rows, self.query_outer.shape[1], -1, tokens, dim)
        weighted = (queries * late).flatten(2, 3)
        # New tensors instead of +=: what `torch.inference_mode` made cannot be written to later.
        self.query_outer = self.query_outer + weighted.mT @ queries.flatten(2, 3)

    def _add_keys(self, key: Tensor, weights: Tensor, value: Tensor | None) -> None:
        total = weights.sum(2, keepdim=True)
        mean = (key.float() * weights).sum(2, keepdim=True) / total.clamp_min(1)
        first = self.count == 0
        self.shift = torch.where(first, mean, self.shift)
        centred = (key.float() - self.shift) * weights
        if self.values is not None:
            assert value is not None
            self.values = self.values.with_tokens(value, centred, weights, first)
        self.key_outer = self.key_outer + centred.mT @ centred
        self.key_sum = self.key_sum + centred.sum(2, keepdim=True)
        self.count = self.count + total

    @property
    def query_sums(self) -> Tensor:
        upper = _upper(self.query_outer)
        return self.query_outer[..., upper[0], upper[1]]

    def restarted(self, query_sums: Tensor) -> Moments:
        square, upper = torch.empty_like(self.query_outer), _upper(self.query_outer)
        square[..., upper[0], upper[1]] = query_sums
        square[..., upper[1], upper[0]] = query_sums
        outer, total, count = map(torch.zeros_like, (self.key_outer, self.key_sum, self.count))
        values = None if self.values is None else self.values.emptied()
        return Moments(self.shift, square, outer, total, count, values)

    @staticmethod
    def query_weight(tokens: Tensor) -> Tensor:
        return (tokens.double() * (tokens + 1) / 2) ** 2  # sum of cubes: `POSITION_POWER` is 3

    def projection(self, rank: int, key_scatter: Tensor | None = None) -> Projection:
        """As `PromptStatistics.projection`, for keys of another scatter about the same mean."""
        if not bool(torch.isfinite(self.key_outer).all() & torch.isfinite(self.query_outer).all()):
            raise InfiniGenError(
                "the queries or keys so far contain NaN or infinity, so no rehearsal can be built; "
                "check the model's weights and dtype (float16 may overflow where bfloat16 does not)"
            )
        scatter = self.key_scatter if key_scatter is None else key_scatter
        query, key = best_projections(self.query_outer, scatter, rank)
        return Projection(query, key, self.key_mean)

    @property
    def key_mean(self) -> Tensor:
        """``(B, H_kv, 1, D)``."""
        return self.shift + self.key_sum / self.count.clamp_min(1)

    @property
    def key_scatter(self) -> Tensor:
        """Sum of (k - mean)^T (k - mean), ``(B, H_kv, D, D)``."""
        return self.key_outer - self.key_sum.mT @ (self.key_sum / self.count.clamp_min(1))

    @property
    def device(self) -> torch.device:
        return self.key_sum.device

    def rows(self, index: Tensor) -> Moments:
        values = None if self.values is None else self.values.rows(index)
        names = "shift", "query_outer", "key_outer", "key_sum", "count"
        return replace(self, values=values, **{name: getattr(self, name)[index] for name in names})


@dataclass(slots=True)
class Magnitudes(PromptStatistics):
    """Sums of |q A| and |k A|: the paper's partial columns."""

    skew: Tensor  # (H_kv, D, D)
    query_sum: Tensor  # (B, H_kv, D)
    key_sum: Tensor  # (B, H_kv, D)

    @classmethod
    def start(cls, key: Tensor, skew: Tensor) -> Magnitudes:
        """Empty sums for keys like ``key`` ``(B, H_kv, Q, D)`` and the layer's skew matrices."""
        batch, heads, _, dim = key.shape
        zeros = torch.zeros(batch, heads, dim, device=key.device)
        return cls(skew.to(key.device), zeros, zeros.clone())

    def _add_queries(self, query: Tensor, position: Tensor, weights: Tensor) -> None:
        rows, _, tokens, dim = query.shape
        queries = query.float().reshape(rows, self.skew.shape[0], -1, dim) @ self.skew
        grouped = queries.reshape(rows, self.skew.shape[0], -1, tokens, dim).abs().sum(2)
        self.query_sum = self.query_sum + (grouped * weights).sum(2)

    def _add_keys(self, key: Tensor, weights: Tensor, value: Tensor | None) -> None:
        magnitudes = (key.float() @ self.skew).abs()
        self.key_sum = self.key_sum + (magnitudes * weights).sum(2)

    @property
    def query_sums(self) -> Tensor:
        return self.query_sum

    def restarted(self, query_sums: Tensor) -> Magnitudes:
        return Magnitudes(self.skew, query_sums, torch.zeros_like(self.key_sum))

    @staticmethod
    def query_weight(tokens: Tensor) -> Tensor:
        return tokens.double()

    def projection(self, rank: int) -> Projection:
        columns = partial_columns(self.query_sum, self.key_sum, rank)
        partial = take_columns(self.skew, columns)
        return Projection(partial, partial, None)

    @property
    def device(self) -> torch.device:
        return self.key_sum.device

    def rows(self, index: Tensor) -> Magnitudes:
        return Magnitudes(self.skew, self.query_sum[index], self.key_sum[index])


def _blocks(key: Tensor) -> list[slice]:
    """Consecutive tokens of keys ``(B, H_kv, Q, D)``, at most `TOKEN_BLOCK` at once."""
    starts = range(0, key.shape[2], TOKEN_BLOCK)
    return [slice(start, min(start + TOKEN_BLOCK, key.shape[2])) for start in starts]


def _column(weight: Tensor | None, key: Tensor, block: slice) -> Tensor:
    """Weights ``(B, Q)`` of a block as float32 ``(B, 1, n, 1)`` that multiply its keys."""
    if weight is None:
        return torch.ones(key.shape[0], 1, block.stop - block.start, 1, device=key.device)
    return weight[:, block].float()[:, None, :, None]


def _upper(square: Tensor) -> Tensor:
    """Indices of the upper triangle, which says all of a symmetric ``(..., D, D)``."""
    dim = square.shape[-1]
    return torch.triu_indices(dim, dim, device=square.device)
