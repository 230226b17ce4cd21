"""Sums over sample text that the fits need, collected by hooks on a model's attention modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinigen_kv.models.adapters.base import Adapter


class LayerSums:
    """Second moments of one speculated layer, float64 sums of float32 products.

    ``input_moment`` ``(M+1, M+1)`` and ``cross_moment`` ``(M+1, N)`` over [x 1] of the previous
    layer and this layer's raw query q; ``query_power`` ``(N,)`` the sum of q squared, and
    ``query_sum``; ``query_moment`` ``(H_kv, D, D)`` over the queries that the attention uses;
    ``tokens`` seen.
    """

    def __init__(self, inputs: int, outputs: int, kv_heads: int, head_dim: int) -> None:
        self.input_moment = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64)
        self.cross_moment = torch.zeros(inputs + 1, outputs, dtype=torch.float64)
        self.query_power = torch.zeros(outputs, dtype=torch.float64)
        self.query_moment = torch.zeros(kv_heads, head_dim, head_dim, dtype=torch.float64)
        self.tokens = 0

    def add(self, previous: Tensor, raw_query: Tensor, query: Tensor) -> None:
        """One batch: x ``(n, M)`` of the previous layer, q ``(n, N)``, and ``(B, H, Q, D)``."""
        x = F.pad(previous.float(), (0, 1), value=1.0)
        q = raw_query.float()
        self.input_moment += (x.mT @ x).double().cpu()
        self.cross_moment += (x.mT @ q).double().cpu()
        self.query_power += q.square().sum(0).double().cpu()
        kv_heads, _, dim = self.query_moment.shape
        grouped = query.float().transpose(0, 1).reshape(kv_heads, -1, dim)
        self.query_moment += (grouped.mT @ grouped).double().cpu()
        self.tokens += x.shape[0]


class Collector:
    """Watches forwards without a cache and adds up `LayerSums` for every layer but the first."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self.sums = {
            spec.index: LayerSums(
                adapter.hidden_size,
                spec.num_heads * spec.head_dim,
                spec.num_kv_heads,
                spec.head_dim,
            )
            for spec in adapter.layers
            if spec.index > 0 and not spec.is_sliding
        }
        self._weights = {index: adapter.query_weight(index) for index in self.sums}
        self._previous: Tensor | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on inside the block, off after it."""
        with ExitStack() as undo:
            # code that was compiled before may pass over hooks that are new
            undo.enter_context(torch.compiler.set_stance("force_eager"))
            for spec in self._adapter.layers:

                def hook(
                    module: nn.Module,
                    args: tuple[Any, ...],
                    kwargs: dict[str, Any],
                    index: int = spec.index,
                ) -> None:
                    self._see(index, self._adapter.attention_input(args, kwargs))

                undo.callback(spec.module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

    def _see(self, index: int, hidden: Tensor) -> None:
        previous, self._previous = self._previous, hidden
        if index not in self.sums or previous is None:
            return
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        raw = F.linear(hidden, *self._weights[index])
        rotary = self._adapter.rotary(index, hidden, positions)
        query = self._adapter.finish_query(index, raw, rotary)
        x = previous.to(hidden.device).flatten(0, 1)
        self.sums[index].add(x, raw.flatten(0, 1), query)
