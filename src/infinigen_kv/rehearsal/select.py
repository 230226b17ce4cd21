"""From rehearsed scores to the tokens that a step moves (paper, section 4.3; design for GQA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from infinigen_kv.attention.dense import grouped_scores
from infinigen_kv.errors import InfiniGenError

TIE_SHARE = 2.0**-20  # of what a best token lacks in the other queries of its group
TIE_LIMIT = 1e-3  # no token comes further behind for that
LAST_QUERIES = 16  # of a prompt; they tell best what the first steps will want

UNSOUND = (
    "the rehearsed scores contain NaN or infinity, so no tokens can be selected: check the model's "
    "weights and dtype (float16 may overflow where bfloat16 does not)"
)


class Candidates(Protocol):
    """What one step may choose from; the same for every layer of the step."""

    allowed: Tensor | None
    """Boolean, broadcastable to ``(B, H_kv, Q, S)``: tokens that may be chosen; None for all."""

    def mark_kept(self, margin: Tensor) -> None:
        """Put +inf where ``margin`` ``(B, H_kv, Q, S)`` belongs to an always-kept token."""

    def bound(self, wanted: Tensor) -> Tensor:
        """Limit the counts ``(B, Q)``, always-kept tokens included, to what a row may fetch."""

    @property
    def limits(self) -> Tensor:
        """Least and largest count of each row ``(B, 2)`` int64, for one query per row."""

    @property
    def marks(self) -> Tensor | None:
        """As bytes ``(B, S)``, for one query per row: 0 may not be chosen, 1 may, 2 is kept; None
        where all may be and the tokens kept are those at the ends.
        """

    @property
    def ends(self) -> tuple[int, int]:
        """How many tokens are always kept at the start and at the end, where there are no marks."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Tokens that one step attends to, per KV head.

    ``index`` is ``(B, H_kv, Q, n)`` int64; ``counts`` ``(B, Q)`` int64 says how many leading ones
    are valid, or is None where all n are, in every row and query. Those that are not valid are
    tokens of the row all the same.
    """

    index: Tensor
    counts: Tensor | None

    def fetched(self) -> float:
        """Mean number of tokens per row, query and KV head."""
        return (
            float(self.index.shape[-1])
            if self.counts is None
            else self.counts.double().mean().item()
        )

    def valid_columns(self) -> tuple[Tensor | None, int]:
        """Which columns are valid, ``(B, 1, n)`` or None for all, and how many entries that makes.

        For one query per row.
        """
        rows, heads, _, columns = self.index.shape
        if self.counts is None:
            return None, rows * heads * columns
        order = torch.arange(columns, device=self.index.device)
        counts = self.counts.to(order.device)
        return (order < counts)[:, None], int(counts.sum()) * heads


def group_margin(scores: Tensor) -> Tensor:
    """How close a token comes to the best one of the query head that likes it most.

    A KV head serves G query heads, each with a scale of its own, so tokens are ranked by the
    largest of (score - that query's highest score). The best tokens of the G queries, which would
    all be at 0, come in the order of what the whole group thinks of them: with fewer places than
    such tokens the choice is then not left to the order in which they lie.

    Parameters
    ----------
    scores
        ``(B, H_kv, G, Q, S)``; tokens that may not be selected hold -inf.

    Returns
    -------
    Tensor
        ``(B, H_kv, Q, S)``, at most 0.
    """
    margin = scores - scores.amax(dim=-1, keepdim=True)
    if scores.shape[2] == 1:
        return margin.squeeze(2)
    largest = margin.amax(dim=2)
    behind = (margin.sum(dim=2) * TIE_SHARE).clamp_min(-TIE_LIMIT)
    return largest.where(largest < 0, behind)


def select_tokens(scores: Tensor, candidates: Candidates, alpha: float) -> Selection:
    """The tokens of one step: the always-kept ones and the best of the rest.

    Per KV head count the tokens whose margin exceeds -alpha, average the count over the heads of a
    row, cap it, and take that many in every head (paper, section 4.3).

    Parameters
    ----------
    scores
        ``(B, H_kv, G, Q, S)`` rehearsed scores, float. Overwritten where tokens are not allowed.
    candidates
        What may and what must be chosen.
    alpha
        Distance from the highest score within which a token is wanted.

    Returns
    -------
    Selection
        ``index`` ``(B, H_kv, Q, n)``.

    Raises
    ------
    InfiniGenError
        Where a score is NaN or +infinity, or one of -infinity would be chosen.
    """
    if candidates.allowed is not None:
        forbidden = ~candidates.allowed.to(scores.device).unsqueeze(2)
        scores = scores.masked_fill_(forbidden, float("-inf"))
    margin = group_margin(scores)
    best = margin.amax(dim=-1)
    if candidates.allowed is not None:  # a query without any token has no scores
        best = best.where(candidates.allowed.any(dim=-1).to(best.device), 0.0)
    if not bool(best.isfinite().all()):
        raise InfiniGenError(UNSOUND)
    candidates.mark_kept(margin)
    wanted = (margin > -alpha).sum(dim=-1).double().mean(dim=1).round().long()
    counts = candidates.bound(wanted)
    if bool(((margin > float("-inf")).sum(dim=-1) < counts.unsqueeze(1)).any()):
        raise InfiniGenError(UNSOUND)
    return top_entries(margin, counts)


def top_entries(margin: Tensor, counts: Tensor) -> Selection:
    """The ``counts`` highest tokens of every KV head.

    Parameters
    ----------
    margin
        ``(B, H_kv, Q, S)``; always-kept tokens hold +inf, excluded ones -inf.
    counts
        ``(B, Q)`` int64, at most the number of allowed tokens.
    """
    most = int(counts.max())
    if counts.numel() == 1:  # order is of no use when every column is valid
        return Selection(margin.topk(most, dim=-1, sorted=False).indices, None)
    return Selection(margin.topk(most, dim=-1, sorted=True).indices, counts)


def likely_tokens(
    count: int,
    query: Tensor,
    keys: Tensor,
    visible: Tensor | None,
    *,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """At most ``count`` tokens ``(B, H_kv, n)`` that a prompt's last queries like best; -1 where a
    row has fewer.

    Parameters
    ----------
    query, keys
        The prompt's, ``(B, H, Q, D)`` and ``(B, H_kv, T, D)``.
    visible
        ``(B, T)`` boolean, False for padding; None where there is none.
    """
    scores = grouped_scores(query[:, :, -LAST_QUERIES:], keys, scaling, softcap)
    if visible is not None:
        real = visible.to(scores.device)[:, None, None, None, :]
        scores = scores.masked_fill(~real, float("-inf"))
    wanted = group_margin(scores).amax(dim=2)  # (B, H_kv, T)
    best = wanted.topk(min(count, wanted.shape[2]), dim=2)
    return best.indices.masked_fill(best.values == float("-inf"), -1)


def selection_mask(selection: Selection, tokens: int) -> Tensor:
    """The same selection as a boolean ``(B, H_kv, Q, tokens)`` mask."""
    index, counts = selection.index, selection.counts
    mask = torch.zeros(*index.shape[:-1], tokens, dtype=torch.bool, device=index.device)
    if counts is None:
        return mask.scatter_(-1, index, True)
    valid = torch.arange(index.shape[-1], device=index.device) < counts[:, None, :, None]
    return mask.scatter_(-1, index, valid.expand_as(index))
