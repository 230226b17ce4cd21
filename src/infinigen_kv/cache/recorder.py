"""What each layer attended to: recorders that a cache calls when one is set."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.select import Selection, group_margin, selection_mask, top_entries

if TYPE_CHECKING:
    from infinigen_kv.models.adapters.layer_spec import LayerSpec
    from infinigen_kv.storage.pools.pool import Pool


class FetchRecorder:
    """Shares of the cache that selecting steps attended to; optionally the indices themselves.

    Set as ``cache.recorder``. Exact steps are not counted; layers without rehearsal count as 1.

    Parameters
    ----------
    keep_indices
        Also keep, in ``selections``, a list of ``(layer, Selection)`` per selecting step's layer,
        with indices on the CPU.

    Attributes
    ----------
    limit
        Tokens that the home can hold, None for any number: steps that attend to everything cannot
        attend to more.
    """

    needs_scores = False
    needs_keys = False

    def __init__(self, *, keep_indices: bool = False) -> None:
        self._keep = keep_indices
        self.limit: int | None = None
        self._shares: dict[int, list[Tensor]] = defaultdict(list)
        self._tokens: dict[int, float] = defaultdict(float)
        self._queries: dict[int, int] = defaultdict(int)
        self.selections: list[tuple[int, Selection]] = []

    def see(
        self,
        spec: LayerSpec,
        query: Tensor,
        keys: Tensor,
        step: Step,
        pool: Pool,
        selection: Selection | None,
    ) -> None:
        """Needed by recorders of another kind."""

    def record(
        self, layer: int, step: Step, selection: Selection | None, scores: Tensor | None
    ) -> None:
        if not step.selecting:
            return
        self._count(layer, step, selection)
        if selection is None:
            self._shares[layer].append(torch.ones(1, dtype=torch.float64))
            return
        cached = step.before.double().clamp_min(1).expand(step.rows, step.queries)
        counts = selection.counts
        fetched = torch.tensor(selection.index.shape[-1]) if counts is None else counts.cpu()
        self._shares[layer].append((fetched / cached.cpu()).flatten())
        if self._keep:
            kept = Selection(selection.index.cpu(), None if counts is None else counts.cpu())
            self.selections.append((layer, kept))

    @property
    def fetched_by_layer(self) -> dict[int, float]:
        """Mean share of the cached tokens that each layer attended to."""
        return {
            layer: torch.cat(shares).mean().item() for layer, shares in sorted(self._shares.items())
        }

    @property
    def tokens_by_layer(self) -> dict[int, float]:
        """Mean number of cached tokens that a step of each layer attended to, per KV head."""
        return {layer: self._tokens[layer] / self._queries[layer] for layer in sorted(self._tokens)}

    def fetched_share(self, *, first_layer: int = 0) -> float:
        """Mean of `fetched_by_layer` over the layers from ``first_layer`` on; NaN without any."""
        shares = [share for layer, share in self.fetched_by_layer.items() if layer >= first_layer]
        return sum(shares) / len(shares) if shares else float("nan")

    def _count(self, layer: int, step: Step, selection: Selection | None) -> None:
        queries = step.rows * step.queries
        if selection is not None:
            attended = selection.fetched()
        else:
            cached = step.before.double().expand(step.rows, step.queries)
            held = cached if self.limit is None else cached.clamp_max(self.limit)
            attended = held.mean().item()
        self._tokens[layer] += attended * queries
        self._queries[layer] += queries


class FidelityRecorder(FetchRecorder):
    """Also compares selections with the true scores, where a forward has several queries.

    ``recall_by_layer``: of the tokens chosen beyond the always-kept ones, the share that the true
    scores would have chosen too, at the same count. ``coverage_by_layer``: attention mass that
    falls on what was attended to, averaged over query heads.
    """

    needs_scores = True

    def __init__(self) -> None:
        super().__init__()
        self._recall: dict[int, list[Tensor]] = defaultdict(list)
        self._coverage: dict[int, list[Tensor]] = defaultdict(list)

    def record(
        self, layer: int, step: Step, selection: Selection | None, scores: Tensor | None
    ) -> None:
        super().record(layer, step, selection, scores)
        if selection is None or scores is None:
            return
        chosen = selection_mask(selection, scores.shape[-1])  # (B, H_kv, Q, S)
        self._coverage[layer].append(_mass_on(chosen, scores, step).flatten())
        self._recall[layer].append(_overlap(chosen, selection, scores, step).flatten())

    @property
    def recall_by_layer(self) -> dict[int, float]:
        """Mean recall of each speculated layer."""
        return {layer: torch.cat(each).nanmean().item() for layer, each in self._recall.items()}

    @property
    def coverage_by_layer(self) -> dict[int, float]:
        """Mean covered attention mass of each speculated layer."""
        return {layer: torch.cat(each).mean().item() for layer, each in self._coverage.items()}


def _mass_on(chosen: Tensor, scores: Tensor, step: Step) -> Tensor:
    """Attention mass ``(B, H_kv, G, Q)`` on the chosen tokens and the query's own."""
    allowed = step.candidates.allowed
    assert allowed is not None
    own = torch.arange(step.start, step.start + step.queries, device=scores.device)
    own_token = torch.zeros_like(chosen).scatter(
        -1, own[None, None, :, None].expand(*chosen.shape[:3], 1), True
    )
    seen = (allowed.to(scores.device) | own_token).unsqueeze(2)
    mass = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return (mass * (chosen | own_token).unsqueeze(2)).sum(dim=-1)


def _overlap(chosen: Tensor, selection: Selection, scores: Tensor, step: Step) -> Tensor:
    """Recall ``(B, H_kv, Q)`` beyond the always-kept tokens; NaN where none was chosen."""
    allowed = step.candidates.allowed
    assert allowed is not None
    margin = group_margin(
        scores.masked_fill(~allowed.to(scores.device).unsqueeze(2), float("-inf"))
    )
    step.candidates.mark_kept(margin)
    kept = torch.isinf(margin) & (margin > 0)
    counts = selection.counts
    if counts is None:
        shape = margin.shape[:1] + margin.shape[2:3]
        counts = torch.full(shape, selection.index.shape[-1], device=margin.device)
    true = selection_mask(top_entries(margin, counts), scores.shape[-1])
    wanted = (true & ~kept).sum(-1).double()
    return (true & chosen & ~kept).sum(-1) / wanted.where(wanted > 0, float("nan"))
