"""How far a rehearsal's scores agree with the true ones: what they choose, and how they rank."""

from __future__ import annotations

import torch
from torch import Tensor

from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.select import group_margin, select_tokens, selection_mask, top_entries
from infinigen_kv_lab.evals.probe import Scores

VARIANTS = ("engine", "true_query", "all_dimensions")
"""Of `Scores`, beside the true ones."""
MEASURES = ("recall", "coverage", "rank_correlation", "divergence")


def compare(
    scores: Scores, step: Step, alpha: float, *, ranked: bool = True
) -> dict[str, list[float]]:
    """Measures of a step's queries, their mean for each head.

    Parameters
    ----------
    ranked
        Whether to compare the scores of all tokens too (the last two of `MEASURES`), which takes
        most of the time.

    Returns
    -------
    dict
        ``VARIANT.MEASURE`` for `VARIANTS` and `MEASURES`, ``best_coverage``, and ``chosen`` (one
        number): recall by KV head, the others by query head.
    """
    allowed = step.candidates.allowed
    assert allowed is not None
    own = torch.arange(step.queries, device=scores.true.device)
    seen = allowed.clone()
    seen[..., own, step.start + own] = True  # a query attends to its own token too
    counts = select_tokens(scores.engine.clone(), step.candidates, alpha).counts
    assert counts is not None
    true_margin, kept = _margin(scores.true, step)
    best = selection_mask(top_entries(true_margin, counts), scores.true.shape[-1])
    attention = _softmax(scores.true, seen)
    found: dict[str, list[float]] = {
        "best_coverage": _heads((attention * _with_own(best, seen, allowed)).sum(-1)),
        "chosen": [(counts / step.before).double().mean().item()],
    }
    for name in VARIANTS:
        mine: Tensor = getattr(scores, name)
        margin, _ = _margin(mine, step)
        chosen = selection_mask(top_entries(margin, counts), mine.shape[-1])
        wanted = (best & ~kept).sum(-1).double()
        overlap = (best & chosen & ~kept).sum(-1) / wanted.where(wanted > 0, float("nan"))
        found[f"{name}.recall"] = overlap.nanmean(dim=(0, 2)).tolist()
        covered = (attention * _with_own(chosen, seen, allowed)).sum(-1)
        found[f"{name}.coverage"] = _heads(covered)
    return {**found, **_compare_all(scores, allowed)} if ranked else found


def _compare_all(scores: Scores, allowed: Tensor) -> dict[str, list[float]]:
    """Rank correlation and divergence of the scores of all tokens that are ``allowed``."""
    ranks, attention = _ranks(scores.true, allowed), _softmax(scores.true, allowed)
    found = {}
    for name in VARIANTS:
        mine: Tensor = getattr(scores, name)
        correlation = _correlation(ranks, _ranks(mine, allowed), allowed)
        found[f"{name}.rank_correlation"] = _heads(correlation)
        divergence = jensen_shannon(attention, _softmax(mine, allowed))
        found[f"{name}.divergence"] = _heads(divergence)
    return found


def jensen_shannon(first: Tensor, second: Tensor) -> Tensor:
    """Jensen-Shannon divergence of distributions along the last axis, in nats."""
    middle = (first + second) / 2
    return (_relative_entropy(first, middle) + _relative_entropy(second, middle)) / 2


def _relative_entropy(first: Tensor, second: Tensor) -> Tensor:
    return (torch.xlogy(first, first) - torch.xlogy(first, second)).sum(-1)


def _margin(scores: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """Margins ``(1, H_kv, Q, S)`` with the always-kept tokens at +inf, and those as a mask."""
    allowed = step.candidates.allowed
    assert allowed is not None
    margin = group_margin(scores.masked_fill(~allowed.unsqueeze(2), float("-inf")))
    step.candidates.mark_kept(margin)
    return margin, torch.isinf(margin) & (margin > 0)


def _with_own(chosen: Tensor, seen: Tensor, allowed: Tensor) -> Tensor:
    """``(1, H_kv, 1, Q, S)``: the chosen tokens and each query's own."""
    return (chosen | (seen & ~allowed)).unsqueeze(2)


def _softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask.unsqueeze(2), float("-inf")).softmax(-1)


def _ranks(scores: Tensor, allowed: Tensor) -> Tensor:
    """Ranks from 0 among the allowed tokens; of others, negative."""
    masked = scores.masked_fill(~allowed.unsqueeze(2), float("-inf"))
    ranks = masked.argsort(dim=-1, stable=True).argsort(dim=-1)
    return ranks - (~allowed).sum(-1, keepdim=True).unsqueeze(2)


def _correlation(first: Tensor, second: Tensor, allowed: Tensor) -> Tensor:
    """Spearman's rank correlation, from ranks without ties: 1 - 6 sum d^2 / (n^3 - n)."""
    count = allowed.sum(-1).unsqueeze(2).double()
    apart = (first - second).masked_fill(~allowed.unsqueeze(2), 0).double()
    return 1 - 6 * apart.square().sum(-1) / (count**3 - count)


def _heads(values: Tensor) -> list[float]:
    """``(1, H_kv, G, Q)`` to the mean of each query head."""
    return values.double().mean(dim=(0, 3)).flatten().tolist()
