"""What a step leaves behind, estimated from the partial keys, which are on the device anyway.

The tokens that are not selected hold a few percent of the attention each step. Their scores follow
from the partial keys and the layer's own query, and their values are guessed from the partial keys
by least squares: ``value ~ base + z slope``. With w the exponentials of the scores, the sum of the
values is then ``(sum w) base + (sum w z) slope``, for which no value has to be moved. Not in the
paper, which gives these tokens no weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from infinigen_kv.attention.dense import SCORES, grouped_scores
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.projection import Projection
from infinigen_kv.rehearsal.statistics import Moments

MIN_RIDGE = 1e-12  # of the ridge, where partial keys do not vary at all


@dataclass(slots=True)
class ValueMap:
    """``value ~ base + z slope`` for a partial key z.

    ``base`` is ``(B, H_kv, 1, D_v)`` and ``slope`` ``(B, H_kv, R, D_v)``, float32.
    """

    base: Tensor
    slope: Tensor
    compiled: Any = field(default=None, init=False, repr=False, compare=False)
    """Kept by compiled kernels, see `kernels.native.constants`."""

    @classmethod
    def fit(cls, projection: Projection, moments: Moments) -> ValueMap:
        """Ridge regression over the tokens of each row and head, from their moments with values.

        Few tokens, or some that hardly vary in a direction, do not tell what values are like there,
        and those to come may go far along it. So the ridge is one token's mean square in the
        direction where partial keys are largest. One in proportion to each direction's own lets a
        prompt of 5 tokens guess values a thousand times too large.
        """
        values, count = moments.values, moments.count.clamp_min(1)
        assert values is not None
        centre = moments.key_mean
        if projection.offset is not None:
            centre = centre - projection.offset
        centre = centre @ projection.key  # of the partial keys, (B, H_kv, 1, R)
        mean = values.total / count
        back = projection.key.mT
        square = back @ moments.key_scatter @ projection.key
        mixed = back @ (values.products - moments.key_sum.mT @ mean)
        spread = square.diagonal(dim1=-2, dim2=-1) / count[..., 0] + centre.squeeze(2).square()
        ridge = spread.amax(dim=-1)[..., None, None].clamp_min(MIN_RIDGE)
        eye = torch.eye(square.shape[-1], device=square.device)
        slope = torch.linalg.solve(square + ridge * eye, mixed)
        return cls(values.shift + mean - centre @ slope, slope.contiguous())

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.base.nbytes + self.slope.nbytes

    def rows(self, index: Tensor) -> ValueMap:
        """Those of the batch rows ``index``."""
        return ValueMap(self.base[index], self.slope[index])

    def with_rows(self, keep: Tensor, old: ValueMap) -> ValueMap:
        """This one, but ``old``'s for the rows marked in ``keep`` ``(B,)``."""
        pick = keep[:, None, None, None]
        return ValueMap(
            torch.where(pick, old.base, self.base), torch.where(pick, old.slope, self.slope)
        )


@dataclass(frozen=True, slots=True)
class Tail:
    """All that is needed to estimate the tokens that a decode step does not move.

    Parameters
    ----------
    partial, values
        Of all tokens before the step.
    index, counts
        The tokens that are attended to exactly, as in `rehearsal.select.Selection`: ``(B, H_kv,
        n)``, and ``(B, 1)`` or None.
    allowed
        ``(B, S)`` boolean, False for what no step may attend to (padding); None for all.
    """

    partial: PartialKeys
    values: ValueMap
    index: Tensor
    counts: Tensor | None
    allowed: Tensor | None

    def hidden(self) -> Tensor:
        """Tokens that are no part of the tail, ``(B, H_kv, 1, 1, S)``."""
        rows, heads, columns = self.index.shape
        tokens, device = self.partial.length, self.index.device
        # one column more, for what is not valid: that repeats tokens of the row, perhaps some that
        # are not attended to
        hidden = torch.zeros(rows, heads, tokens + 1, dtype=torch.bool, device=device)
        index = self.index
        if self.counts is not None:
            valid = torch.arange(columns, device=device) < self.counts.to(device)
            index = index.where(valid.unsqueeze(1), tokens)
        hidden = hidden.scatter_(2, index, True)[..., :tokens]
        if self.allowed is not None:
            hidden = hidden | ~self.allowed.to(device).unsqueeze(1)
        return hidden[:, :, None, None]


def attention_with_tail(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attended: Tensor | None,
    partial: PartialKeys,
    value_map: ValueMap,
    hidden: Tensor,
    *,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Softmax attention over what is attended to exactly and the estimate of the rest.

    A token of the tail weighs no more than the best of those attended to: a wrong estimate must not
    drown them.

    Parameters
    ----------
    query, keys, values
        ``(B, H, Q, D)``, ``(B, H_kv, n, D)`` and ``(B, H_kv, n, D_v)``.
    attended
        Boolean, broadcastable to ``(B, H_kv, Q, n)``; None for all n. Queries of padding may
        attend to nothing: their output is 0.
    hidden
        Boolean, broadcastable to ``(B, H_kv, 1, Q, S)``, True for the tokens of the partial keys
        that are no part of the tail.

    Returns
    -------
    Tensor
        ``(B, Q, H, D_v)``.
    """
    rows, heads, queries, _ = query.shape
    scores = grouped_scores(query, keys, scaling, softcap)  # (B, H_kv, G, Q, n)
    if attended is not None:
        scores = scores.masked_fill(~attended.unsqueeze(2), float("-inf"))
    top = scores.amax(dim=-1, keepdim=True)
    seeing = top > float("-inf")
    top = top.where(seeing | top.isnan(), 0.0)
    weights = (scores - top).exp()
    rest = partial.scores(query, scaling, softcap, absolute=True)  # (B, H_kv, G, Q, S)
    rest = (rest - top).clamp(max=0).exp().masked_fill(hidden | ~seeing, 0.0)
    total = weights.sum(-1, keepdim=True) + rest.sum(-1, keepdim=True)
    mass = rest.sum(-1).flatten(2).unsqueeze(-1)  # (B, H_kv, G * Q, 1)
    moved = partial.weighted(rest.flatten(2, 3))  # (B, H_kv, G * Q, R)
    sums = weights.flatten(2, 3) @ values.float()
    sums = sums + mass * value_map.base + moved @ value_map.slope
    output = sums / total.flatten(2, 3).masked_fill(~seeing.flatten(2, 3), 1.0)
    return output.view(rows, heads, queries, -1).transpose(1, 2).to(values.dtype)


def attention_in_blocks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attended: Tensor,
    partial: PartialKeys,
    value_map: ValueMap,
    hidden: Tensor,
    *,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """As `attention_with_tail`, for many queries: about `attention.dense.SCORES` scores at once.

    ``attended`` is ``(B, H_kv, Q, S)`` and ``hidden`` ``(B, H_kv or 1, 1, Q, S)``.
    """
    rows, heads, queries, _ = query.shape
    at_once = max(1, SCORES // (rows * heads * keys.shape[2]))
    return torch.cat(
        [
            attention_with_tail(
                query[:, :, start : start + at_once],
                keys,
                values,
                attended[:, :, start : start + at_once],
                partial,
                value_map,
                hidden[:, :, :, start : start + at_once],
                scaling=scaling,
                softcap=softcap,
            )
            for start in range(0, queries, at_once)
        ],
        dim=1,
    )
