"""The method once more, as plain loops over NumPy arrays: what the engine must agree with.

`NaiveSelection` runs inside an unattached model with Transformers' own cache. It shares no code
with the package; from the calibration it takes only the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from infinigen_kv import Calibration, InfiniGenConfig

NAME = "naive_selection_for_tests"
Array = Any  # numpy.ndarray of float64


class NaiveSelection:
    """A model's attention with selection in every decode step, after a prompt in full.

    ``chosen`` lists, layer by layer and step by step, ``(layer, row, [set of tokens by KV head])``;
    tokens are numbered without the row's padding.
    """

    def __init__(
        self, model: PreTrainedModel, calibration: Calibration, config: InfiniGenConfig
    ) -> None:
        self.chosen: list[tuple[int, int, list[set[int]]]] = []
        self.padding: tuple[int, ...] = (0,)
        self._model: Any = model
        self._calibration = calibration
        self._config = config
        self._inputs: dict[int, Tensor] = {}
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}
        self._prompt: dict[int, tuple[Array, Array, Array]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside the block the model attends through this object."""
        AttentionInterface.register(NAME, self._attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        before = self._model.config._attn_implementation
        with ExitStack() as undo:
            undo.callback(self._model.set_attn_implementation, before)
            self._model.set_attn_implementation(NAME)
            for block in self._model.get_decoder().layers:
                module = block.attention if hasattr(block, "attention") else block.self_attn
                handle = module.register_forward_pre_hook(self._see, with_kwargs=True)
                undo.callback(handle.remove)
            yield

    def _see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs[module.layer_idx] = args[0] if args else kwargs["hidden_states"]
        if kwargs.get("position_embeddings") is not None:
            self._rotary[module.layer_idx] = kwargs["position_embeddings"]

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        index, single = module.layer_idx, query.shape[2] == 1
        if not single:
            self._prompt[index] = (_array(query), _array(key), _array(value))
        if not single or index not in self._calibration.layers:
            return _plain(query, key, value, mask, scaling, softcap), None
        rows = [
            self._attend_row(module, row, query, key, value, scaling, softcap)
            for row in range(query.shape[0])
        ]
        return torch.tensor(np.stack(rows)[:, None], dtype=query.dtype), None

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
        """Outputs ``(H, D)`` of one row's only query."""
        pad = self.padding[row]
        queries, keys, values = (_array(each)[row][:, pad:] for each in (query, key, value))
        queries = _array(query)[row][:, 0]
        group = len(queries) // len(keys)
        predicted = self._predict(module, row)
        margins = []
        for head in range(len(keys)):
            mine = predicted[head * group : (head + 1) * group]
            score = self._scorer(module.layer_idx, row, head, group)
            scores = np.array([[score(q * scaling, k) for k in keys[head][:-1]] for q in mine])
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            margins.append([max(s[t] - s.max() for s in scores) for t in range(scores.shape[1])])
        sets = self._select(margins)
        self.chosen.append((module.layer_idx, row, sets))
        outputs = []
        for head, q in enumerate(queries):
            kv = head // group
            seen = [*sorted(sets[kv]), keys.shape[1] - 1]
            scores = np.array([scaling * (q @ keys[kv][t]) for t in seen])
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            top = scores.max()
            weights = np.exp(scores - top)
            total = weights.sum()
            output = sum(w * values[kv][t] for w, t in zip(weights, seen, strict=True))
            if self._config.tail:
                score = self._scorer(module.layer_idx, row, kv, group)
                guess = self._guesser(module.layer_idx, row, kv, group)
                for t in set(range(keys.shape[1] - 1)) - sets[kv]:
                    rest = score(q * scaling, keys[kv][t])
                    rest = rest if softcap is None else softcap * np.tanh(rest / softcap)
                    weight = min(1.0, np.exp(rest - top))
                    total += weight
                    output = output + weight * guess(keys[kv][t])
            outputs.append(output / total)
        return np.stack(outputs)

    def _select(self, margins: list[list[float]]) -> list[set[int]]:
        config, cached = self._config, len(margins[0])
        assert not isinstance(config.alpha, tuple)
        kept = {
            t for t in range(cached) if t < config.sink_tokens or t >= cached - config.recent_tokens
        }
        counts = [
            sum(t in kept or margin[t] > -config.alpha for t in range(cached)) for margin in margins
        ]
        count = round(sum(counts) / len(counts))
        count = max(count, len(kept))
        count = min(count, max(math.floor(cached * config.max_fetch), len(kept)))
        order = [
            sorted(range(cached), key=lambda t: (t not in kept, -margin[t])) for margin in margins
        ]
        for margin, each in zip(margins, order, strict=True):
            if each[count - 1] not in kept and count < cached:
                # Each query head of a group puts its own best token at exactly 0, so a count below
                # kept + G leaves a choice to the group's sums, which this loop does not follow.
                cut = margin[each[count - 1]] - margin[each[count]]
                assert cut > 1e-5, "a tie at the cut: the result is not determined, change the test"
        return [set(each[:count]) for each in order]

    def _predict(self, module: Any, row: int) -> Array:
        """Queries ``(H, D)`` of this layer, read from the previous layer's input."""
        index = module.layer_idx
        x = _array(self._inputs[index - 1])[row, 0]
        weight, bias = _query_projection(module)
        raw = weight @ x + bias
        if self._config.rehearsal == "calibrated":
            fitted = self._calibration.layers[index]
            raw = raw + np.append(x, 1.0) @ _array(fitted.down) @ _array(fitted.up)
        heads = raw.reshape(-1, self._prompt[index][0].shape[-1])
        if hasattr(module, "q_norm"):
            heads = _array(module.q_norm(torch.tensor(heads, dtype=torch.float32)))
        if self._model.config.model_type == "opt":
            return heads * module.scaling
        cos, sin = (_array(each) for each in self._rotary[index])
        at = row if len(cos) > 1 else 0
        return np.stack([_rotated(head, cos[at, 0], sin[at, 0]) for head in heads])

    def _scorer(self, index: int, row: int, head: int, group: int) -> Any:
        """``(scaled query (D,), key (D,)) -> score``, of rank R."""
        queries, keys, _ = self._prompt_of(index, row, head, group)
        rank = max(1, round(self._config.partial_ratio * keys.shape[1]))
        if self._config.rehearsal == "paper":
            skew = _array(self._calibration.layers[index].skew)[head]
            size = sum(abs(q @ skew) for each in queries for q in each)
            size = size + sum(abs(k @ skew) for k in keys)
            columns = np.argsort(-size)[:rank]
            return lambda q, k: (q @ skew)[columns] @ (k @ skew)[columns]
        mean, to_query, to_key = self._projections(index, row, head, group)
        # with the mean's own score the height is right too, which a soft cap and the tail need
        return lambda q, k: (q @ to_query) @ ((k - mean) @ to_key) + q @ mean

    def _guesser(self, index: int, row: int, head: int, group: int) -> Any:
        """``key (D,) -> value (D_v,)``: least squares from the partial keys of the prompt."""
        mean, _, to_key = self._projections(index, row, head, group)
        _, keys, values = self._prompt_of(index, row, head, group)
        partial = (keys - mean) @ to_key
        spread, mixed = partial - partial.mean(axis=0), values - values.mean(axis=0)
        square = spread.T @ spread
        square = square + np.eye(len(square)) * (partial**2).mean(axis=0).max()
        slope = np.linalg.solve(square, spread.T @ mixed)
        base = values.mean(axis=0) - partial.mean(axis=0) @ slope
        return lambda k: base + ((k - mean) @ to_key) @ slope

    def _prompt_of(self, index: int, row: int, head: int, group: int) -> tuple[Array, Array, Array]:
        """Queries ``(G, T, D)``, keys and values ``(T, D)`` of one head's prompt."""
        queries, keys, values = (each[row][:, self.padding[row] :] for each in self._prompt[index])
        return queries[head * group : (head + 1) * group], keys[head], values[head]

    def _projections(
        self, index: int, row: int, head: int, group: int
    ) -> tuple[Array, Array, Array]:
        """Mean key ``(D,)``, and what projects queries and centred keys ``(D, R)``."""
        queries, keys, _ = self._prompt_of(index, row, head, group)
        rank = max(1, round(self._config.partial_ratio * keys.shape[1]))
        mean = keys.mean(axis=0)
        moment = sum((t + 1) ** 3 * np.outer(q, q) for each in queries for t, q in enumerate(each))
        spread = sum(np.outer(k - mean, k - mean) for k in keys)
        left, scale, right = np.linalg.svd(_power(moment, 0.5) @ _power(spread, 0.5))
        to_query = _power(moment, -0.5) @ left[:, :rank] * np.sqrt(scale[:rank])
        to_key = _power(spread, -0.5) @ right.T[:, :rank] * np.sqrt(scale[:rank])
        return mean, to_query, to_key


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    scores = query @ key.mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:]).tril(scores.shape[-1] - scores.shape[-2]).bool()
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num()
    return (weights @ value).transpose(1, 2)


def _query_projection(module: nn.Module) -> tuple[Array, Array]:
    inner: Any = module
    if not hasattr(inner, "query_key_value"):
        bias = inner.q_proj.bias
        return _array(inner.q_proj.weight), 0.0 if bias is None else _array(bias)
    weight, bias = _array(inner.query_key_value.weight), _array(inner.query_key_value.bias)
    size = inner.head_size
    rows = [3 * head * size + d for head in range(len(weight) // (3 * size)) for d in range(size)]
    return weight[rows], bias[rows]


def _rotated(head: Array, cos: Array, sin: Array) -> Array:
    half = len(cos) // 2
    turned = head.copy()
    for d in range(half):
        a, b = head[d], head[d + half]
        turned[d] = a * cos[d] - b * sin[d]
        turned[d + half] = b * cos[d + half] + a * sin[d + half]
    return turned


def _power(moment: Array, exponent: float) -> Array:
    values, vectors = np.linalg.eigh(moment)
    values = np.maximum(values, 1e-4 * values[-1])
    return vectors @ np.diag(values**exponent) @ vectors.T


def _array(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()
