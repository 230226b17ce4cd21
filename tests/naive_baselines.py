"""The compared policies once more, as plain Python over sets: what the engine must agree with."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol, cast

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from infinigen_kv import InfiniGenConfig
from naive import Array, NaiveSelection, _array

Weights = dict[int, float]  # by token, summed over the query heads of a group


class Chooser(Protocol):
    """One policy for one KV head of one row; tokens are numbered without padding."""

    def read(self, weights: Weights, group: int) -> None:
        """One query of the prompt has given this to the tokens up to itself."""

    def choose(self, cached: int, score: GroupScore, keys: Array) -> set[int]:
        """What a step attends to, its own token apart. ``score(g, key)`` of query head g."""

    def attended(self, weights: Weights, group: int) -> None:
        """A step has given this; its own token is the newest."""


class Budget:
    """A share of the cached tokens."""

    def __init__(self, share: float, min_context: int) -> None:
        self._share, self._least = share, min_context

    def tokens(self, cached: int) -> int:
        if cached < self._least:
            return cached
        return max(1, math.floor(self._share * cached))


class NaiveH2O(Budget):
    """Greedy eviction of the token with the least attention so far."""

    def __init__(self, share: float, min_context: int) -> None:
        super().__init__(share, min_context)
        self.kept: set[int] = set()
        self.total: dict[int, float] = {}

    def read(self, weights: Weights, group: int) -> None:
        self.attended(weights, group)

    def choose(self, cached: int, score: Any, keys: Array) -> set[int]:
        budget = self.tokens(cached)
        recent = budget - budget // 2
        while len(self.kept) > budget:
            old = [token for token in self.kept if token < cached - recent]
            self.kept.remove(min(old, key=self.total.__getitem__))
        return set(self.kept)

    def attended(self, weights: Weights, group: int) -> None:
        for token, weight in weights.items():
            self.total[token] = self.total.get(token, 0.0) + weight
        self.kept.add(max(weights))


class NaiveScissorhands(Budget):
    """Eviction of the token that the most of the last queries found less than average."""

    def __init__(self, share: float, min_context: int, history: int, recent: int) -> None:
        super().__init__(share, min_context)
        self.kept: set[int] = set()
        self.recent = recent
        self.low: deque[set[int]] = deque(maxlen=history)

    def read(self, weights: Weights, group: int) -> None:
        self.attended(weights, group)

    def choose(self, cached: int, score: Any, keys: Array) -> set[int]:
        budget = self.tokens(cached)
        recent = min(self.recent, budget)
        while len(self.kept) > budget:
            old = [token for token in self.kept if token < cached - recent]
            counts = {token: sum(token in low for low in self.low) for token in old}
            self.kept.remove(max(old, key=lambda token: (counts[token], -token)))
        return set(self.kept)

    def attended(self, weights: Weights, group: int) -> None:
        average = group / len(weights)
        self.low.append({token for token, weight in weights.items() if weight < average})
        self.kept.add(max(weights))


class NaiveStreaming(Budget):
    """Sinks and a window."""

    def __init__(self, share: float, min_context: int, sinks: int) -> None:
        super().__init__(share, min_context)
        self.sinks = sinks

    def read(self, weights: Weights, group: int) -> None:
        """It does not look."""

    def attended(self, weights: Weights, group: int) -> None:
        """It does not look."""

    def choose(self, cached: int, score: Any, keys: Array) -> set[int]:
        budget = self.tokens(cached)
        chosen: list[int] = list(range(min(self.sinks, budget - 1)))
        newest = cached - 1
        while len(chosen) < budget:
            chosen.append(newest)
            newest -= 1
        return set(chosen)


class NaiveQuest(Budget):
    """The newest page, then the others by the highest score that their bounds allow."""

    def __init__(self, share: float, min_context: int, page: int) -> None:
        super().__init__(share, min_context)
        self.page = page

    def read(self, weights: Weights, group: int) -> None:
        """It does not look."""

    def attended(self, weights: Weights, group: int) -> None:
        """It does not look."""

    def choose(self, cached: int, score: Any, keys: Array) -> set[int]:
        budget = self.tokens(cached)
        pages = [
            list(range(start, min(start + self.page, cached)))
            for start in range(0, cached, self.page)
        ]
        newest = pages.pop()[-budget:]
        order = list(newest)
        bounds = np.array(
            [[self._bound(query, keys[page]) for page in pages] for query in score.queries]
        )
        if pages:
            if score.softcap is not None:
                bounds = score.softcap * np.tanh(bounds / score.softcap)
            margin = (bounds - bounds.max(axis=1, keepdims=True)).max(axis=0)
            for page in sorted(range(len(pages)), key=lambda at: -margin[at]):
                order += pages[page]
        return set(order[:budget])

    @staticmethod
    def _bound(query: Array, keys: Array) -> float:
        least, largest = keys.min(axis=0), keys.max(axis=0)
        return sum(
            max(q * low, q * high) for q, low, high in zip(query, least, largest, strict=True)
        )


class GroupScore:
    """True scores of the query heads that share a KV head."""

    def __init__(self, queries: Array, scaling: float, softcap: float | None) -> None:
        self.queries = queries * scaling
        self.softcap = softcap

    def weights(self, keys: Array) -> Array:
        """Probabilities ``(G, n)``."""
        scores = self.queries @ keys.T
        if self.softcap is not None:
            scores = self.softcap * np.tanh(scores / self.softcap)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)


class NaiveBaseline(NaiveSelection):
    """A model's attention under one of the policies above, after a prompt in full."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: InfiniGenConfig,
        make: Callable[[], Chooser],
    ) -> None:
        count = model.config.num_hidden_layers
        kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * count
        full = {layer: None for layer, kind in enumerate(kinds) if kind == "full_attention"}
        super().__init__(model, cast(Any, SimpleNamespace(layers=full)), config)
        self._make = make
        self._choosers: dict[tuple[int, int, int], Chooser] = {}

    def _attend_row(
        self,
        module: Any,
        row: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        softcap: float | None,
    ) -> Array:
        pad = self.padding[row]
        keys, values = (_array(each)[row][:, pad:] for each in (key, value))
        queries = _array(query)[row][:, 0]
        group = len(queries) // len(keys)
        sets, outputs = [], []
        for head in range(len(keys)):
            score = GroupScore(queries[head * group : (head + 1) * group], scaling, softcap)
            chooser = self._chooser(module.layer_idx, row, head, group, scaling, softcap)
            chosen = chooser.choose(keys.shape[1] - 1, score, keys[head][:-1])
            seen = [*sorted(chosen), keys.shape[1] - 1]
            weights = score.weights(keys[head][seen])
            chooser.attended(dict(zip(seen, weights.sum(axis=0), strict=True)), group)
            outputs.append(weights @ values[head][seen])
            sets.append(chosen)
        self.chosen.append((module.layer_idx, row, sets))
        return np.concatenate(outputs)

    def _chooser(
        self, layer: int, row: int, head: int, group: int, scaling: float, softcap: float | None
    ) -> Chooser:
        if (layer, row, head) not in self._choosers:
            made = self._choosers[layer, row, head] = self._make()
            pad = self.padding[row]
            queries, keys, _ = (each[row][:, pad:] for each in self._prompt[layer])
            for at in range(keys.shape[1]):
                mine = queries[head * group : (head + 1) * group, at]
                weights = GroupScore(mine, scaling, softcap).weights(keys[head][: at + 1])
                made.read(dict(enumerate(weights.sum(axis=0))), group)
        return self._choosers[layer, row, head]
