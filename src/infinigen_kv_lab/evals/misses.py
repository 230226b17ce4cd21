"""How often a limited home has evicted what a decode step would have wanted."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infinigen_kv.attention.dense import grouped_scores
from infinigen_kv.policies.step import Recorder, Step
from infinigen_kv.rehearsal.select import Selection, group_margin, selection_mask, top_entries
from infinigen_kv.storage.homes.buffer import TokenBuffer
from infinigen_kv.storage.pools.pool import Pool

if TYPE_CHECKING:
    from infinigen_kv.models.adapters.layer_spec import LayerSpec


@dataclass(slots=True)
class Misses:
    """Sums over decode steps and the layers whose home is limited.

    A step wants the tokens with the highest true scores, as many as it attends to: what the policy
    ``oracle`` would choose if nothing had been evicted. The scores are those of the step's own
    query over all tokens that were ever added, so what evictions did to earlier steps is in them.

    Attributes
    ----------
    wanted, missed
        Tokens wanted, summed over KV heads, and those of them that had been evicted.
    mass, queries
        Attention mass that full attention would have put on evicted tokens, summed over query
        heads, and how many of these there were.
    """

    wanted: int = 0
    missed: int = 0
    mass: float = 0.0
    queries: int = 0


class MissRecorder:
    """Counts `Misses` of one cache, whose keys it keeps for that; a recorder of a cache's steps.

    To be set before the cache's first forward. For rows without padding.

    Parameters
    ----------
    misses
        Where to add to.
    inner
        What `record` is passed on to.
    """

    needs_scores = False
    needs_keys = True

    def __init__(self, misses: Misses, inner: Recorder) -> None:
        self._misses = misses
        self._inner = inner
        self._keys: dict[int, TokenBuffer] = {}

    def fork(self) -> MissRecorder:
        """For a copy of the cache, adding to the same sums."""
        other = MissRecorder(self._misses, self._inner)
        other._keys = copy.deepcopy(self._keys)
        return other

    def record(
        self, layer: int, step: Step, selection: Selection | None, scores: Tensor | None
    ) -> None:
        self._inner.record(layer, step, selection, scores)

    def see(
        self,
        spec: LayerSpec,
        query: Tensor,
        keys: Tensor,
        step: Step,
        pool: Pool,
        selection: Selection | None,
    ) -> None:
        if pool.free is None:
            return
        assert step.visible is None
        every = self._keep(spec.index, keys)
        if not step.selecting or step.queries > 1:
            return
        positions = pool.positions
        held = step.start if positions is None else positions.shape[1]
        counts = _counts(selection, keys.shape[0], held, keys.device)
        self._misses.wanted += int(counts.sum()) * keys.shape[1]
        self._misses.queries += query.shape[0] * query.shape[1]
        if positions is None:
            return
        evicted = torch.ones(keys.shape[0], step.start, dtype=torch.bool, device=keys.device)
        evicted = evicted.scatter(1, positions.to(keys.device), False)
        scores = grouped_scores(query, every, spec.scaling, spec.softcap)  # (B, H_kv, G, 1, S + 1)
        mass = scores.softmax(dim=-1)[..., :-1] * evicted[:, None, None, None]
        self._misses.mass += mass.sum().item()
        best = top_entries(group_margin(scores[..., :-1]), counts)
        missed = selection_mask(best, step.start) & evicted[:, None, None]
        self._misses.missed += int(missed.sum())

    def _keep(self, layer: int, keys: Tensor) -> Tensor:
        """All keys so far ``(B, H_kv, T, D)``, with the new ones last."""
        if layer not in self._keys:
            rows, heads, _, dim = keys.shape
            self._keys[layer] = TokenBuffer(rows, heads, dim, dtype=keys.dtype, device=keys.device)
        self._keys[layer].extend(keys.shape[2]).copy_(keys)
        return self._keys[layer].view()


def _counts(selection: Selection | None, rows: int, held: int, device: torch.device) -> Tensor:
    """``(B, 1)`` tokens that a step attends to beside its own."""
    if selection is not None and selection.counts is not None:
        return selection.counts.to(device)
    attended = held if selection is None else selection.index.shape[3]
    return torch.full((rows, 1), attended, device=device)
