"""What the baselines share: a layer's true attention, and how many tokens a row may have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from infinigen_kv.attention.dense import grouped_scores
from infinigen_kv.policies.entry import Scoring
from infinigen_kv.policies.settings import PolicySettings
from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.select import Selection
from infinigen_kv.storage.pools.pool import Pool

QUERY_BLOCK = 128  # queries of a prompt scored at once, at most
SCRATCH = 64 * 2**20  # bytes of scores at once, unless those of one query are more


class Attention(NamedTuple):
    """What Q queries gave to n tokens.

    ``weights`` ``(B, H_kv, Q, n)`` float32 are probabilities summed over a group's query heads,
    ``seen`` says which tokens there were for a query, boolean and broadcastable to ``weights``, and
    ``average`` ``(B or 1, H_kv or 1, Q, 1)`` is what each would have got had all got the same.
    """

    weights: Tensor
    seen: Tensor
    average: Tensor


def exact_attention(
    query: Tensor, keys: Tensor, step: Step, scoring: Scoring, first: int = 0
) -> Iterator[tuple[slice, Attention]]:
    """Full attention of a forward, block by block of queries.

    Parameters
    ----------
    query
        ``(B, H, Q, D)``.
    keys
        ``(B, H_kv, start + Q, D)``: all keys, those of this forward last.
    first
        The first query that is of interest.

    Yields
    ------
    tuple
        The block's queries, and their attention to the tokens up to the last of them:
        n = start + ``block.stop``.
    """
    rows, heads, queries, _ = query.shape
    group = heads // keys.shape[1]
    size = max(1, min(QUERY_BLOCK, SCRATCH // (rows * heads * keys.shape[2] * 4)))
    for begin in range(first, queries, size):
        block = slice(begin, min(begin + size, queries))
        tokens = step.start + block.stop
        scores = grouped_scores(
            query[:, :, block], keys[:, :, :tokens], scoring.scaling, scoring.softcap
        )
        place = torch.arange(tokens, device=scores.device)
        seen = (place <= place[step.start + begin :, None])[None, None]  # (1, 1, Q, n)
        if step.visible is None:
            own = slice(step.start + begin, None)  # all see what is before the block
            scores[..., own].masked_fill_(~seen[..., own].unsqueeze(2), float("-inf"))
            weights = scores.softmax(dim=-1)
        else:
            real = step.visible.to(scores.device)
            seen = seen & real[:, None, None, :tokens]
            seen = seen & real[:, None, step.start + begin : tokens, None]  # no padding queries
            hidden = ~seen.unsqueeze(2)
            weights = scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1)
            weights = weights.masked_fill_(hidden, 0.0)  # queries of padding see nothing
        average = group / seen.sum(dim=-1, keepdim=True).clamp_min(1)
        yield block, Attention(weights.sum(dim=2), seen, average)


def keys_with_new(pool: Pool, keys: Tensor, start: int) -> Tensor:
    """All keys ``(B, H_kv, start + Q, D)`` of a pool that has got ``keys`` by now."""
    if start == 0:
        return keys
    held, _ = pool.all()
    return torch.cat([held[:, :, :start], keys], dim=2)


def cached_tokens(step: Step, query: int = 0) -> list[int]:
    """Real tokens before a query of the step: one number for all rows, or one for each."""
    return [step.start + query] if step.visible is None else step.before[:, query].tolist()


def budgets(step: Step, settings: PolicySettings, query: int = 0) -> list[int]:
    """Tokens that a query of the step may attend to beside its own: one number for all rows, or one
    for each.
    """
    least = step.config.min_context
    return [settings.tokens(each, least) for each in cached_tokens(step, query)]


def counted(counts: list[int], device: torch.device) -> Tensor | None:
    """``(B, 1)`` counts of a selection's rows; None where they are all the same."""
    return None if len(set(counts)) == 1 else torch.tensor(counts, device=device).unsqueeze(1)


def token_positions(tokens: Tensor, step: Step) -> Tensor:
    """Positions of the real tokens number ``tokens`` ``(B, H_kv, n)`` of their rows."""
    if step.visible is None:
        return tokens.contiguous()
    real = step.visible.to(tokens.device).int()
    order = real.argsort(dim=1, descending=True, stable=True)
    return order.unsqueeze(1).expand(-1, tokens.shape[1], -1).gather(2, tokens)


def side_by_side(selections: list[Selection], start: int) -> Selection:
    """Selections of one query each as one of several queries, the first at position ``start``.

    What is not valid is the query's own token, which is attended to anyway.
    """
    most = max(each.index.shape[3] for each in selections)
    indices, counts = [], []
    for place, each in enumerate(selections):
        rows, heads, _, columns = each.index.shape
        index = each.index.new_full((rows, heads, 1, most), start + place)
        if each.counts is None:
            index[..., :columns] = each.index
            counts.append(each.index.new_full((rows, 1), columns))
        else:
            valid = torch.arange(columns, device=index.device) < each.counts[:, :, None, None]
            index[..., :columns] = each.index.where(valid, start + place)
            counts.append(each.counts)
        indices.append(index)
    return Selection(torch.cat(indices, dim=2), torch.cat(counts, dim=1))
