"""`kernels.base.Kernels` by numba: one call into compiled code for each part of a decode step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from infinigen_kv.attention.entries import Entries
from infinigen_kv.errors import InfiniGenError
from infinigen_kv.kernels.base import AddLowRank, Kernels
from infinigen_kv.kernels.native.arrays import Array, as_array, as_arrays, as_flat
from infinigen_kv.kernels.native.attend import attend
from infinigen_kv.kernels.native.constants import NO_CODES, Codes, arrays_of, value_arrays
from infinigen_kv.kernels.native.low_rank import add_low_rank
from infinigen_kv.kernels.native.partial_keys import append_partial
from infinigen_kv.kernels.native.resident_set import NativeResidentSet
from infinigen_kv.kernels.native.selecting import select_tokens
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.select import UNSOUND, Candidates, Selection
from infinigen_kv.rehearsal.tail import Tail

NO_MARKS = np.zeros((0, 0), dtype=np.uint8)
NO_INDEX = np.zeros((0, 0, 0), dtype=np.int64)


class NativeKernels(Kernels):
    """For float32 and bfloat16 on a CPU. One thread at a time may use it: it holds scratch memory.

    Scores are float32 sums, whatever the dtype of the partial keys.
    """

    name = "native"
    resident_set = NativeResidentSet

    def __init__(self) -> None:
        self._scores = np.empty((0, 0, 0), dtype=np.float32)
        self._margins = np.empty((0, 0), dtype=np.float32)
        self._weights = np.empty((0, 0, 0, 0), dtype=np.float32)

    def select(
        self,
        query: Tensor,
        keys: PartialKeys,
        candidates: Candidates,
        *,
        scaling: float,
        alpha: float,
        softcap: float | None,
    ) -> Selection:
        projection = keys.projection
        rows, heads, dim, _ = projection.query.shape
        grouped = query.reshape(rows, heads, -1, dim)
        group = grouped.shape[2]
        self._reserve_scores(rows * heads, group, keys.length)
        marks = candidates.marks
        # compiled code does not look at where an array ends
        assert marks is None or marks.shape == (rows, keys.length)
        layer = arrays_of(keys)
        chosen, counts, sound = select_tokens(
            as_array(grouped),
            np.float32(scaling),
            layer.query,
            layer.height,
            layer.keys,
            layer.codes,
            keys.length,
            np.float32(softcap or 0.0),
            np.float32(alpha),
            NO_MARKS if marks is None else marks.numpy(),
            *candidates.ends,
            candidates.limits.numpy(),
            self._scores,
            self._margins,
        )
        if not sound:
            raise InfiniGenError(UNSOUND)
        index = torch.from_numpy(chosen).unsqueeze(2)
        return Selection(index, None if rows == 1 else torch.from_numpy(counts).unsqueeze(1))

    def attend(
        self,
        query: Tensor,
        entries: Entries,
        counts: Tensor | None,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        softcap: float | None,
        weighed: bool = False,
        tail: Tail | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert tail is None or not weighed
        rows, kv_heads = keys.shape[:2]
        heads, value_dim = query.shape[1], values.shape[3]
        places = entries.keys.shape[2]
        index = entries.places
        columns = places if index is None else index.shape[2]
        flat_keys, key_stride, flat_values, value_stride, stride = as_flat(
            entries.keys, entries.values
        )
        assert entries.keys.shape[3] == query.shape[3] and entries.values.shape[3] == value_dim
        assert index is None or index.shape[:2] == entries.keys.shape[:2] == (rows, kv_heads)
        group = heads // kv_heads
        weights = self._weight_room(rows, kv_heads, group, columns + 1)
        output = query.new_empty(rows, 1, heads, value_dim)
        valid = np.full(rows, columns) if counts is None else counts.reshape(-1).numpy()
        queries, own_keys, own_values, outputs = as_arrays(
            query.squeeze(2), keys.squeeze(2), values.squeeze(2), output.squeeze(1)
        )
        attend(
            queries,
            flat_keys,
            key_stride,
            flat_values,
            value_stride,
            stride,
            NO_INDEX if index is None else index.contiguous().numpy(),
            valid,
            own_keys,
            own_values,
            np.float32(scaling),
            np.float32(softcap or 0.0),
            _no_tail(flat_keys) if tail is None else _tail(tail, rows, kv_heads),
            weights,
            outputs,
        )
        if not weighed:
            return output, None
        return output, _columns(weights[:, :, :group], valid, columns)

    def attend_all(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        if mask is not None:
            return super().attend_all(
                query, keys, values, mask=mask, scaling=scaling, softcap=softcap
            )
        own_keys, own_values = keys[:, :, -1:], values[:, :, -1:]
        others = Entries(keys[:, :, :-1], values[:, :, :-1], None)
        output, _ = self.attend(
            query, others, None, own_keys, own_values, scaling=scaling, softcap=softcap
        )
        return output

    def append(self, partial: PartialKeys, keys: Tensor) -> None:
        token = partial.extend(1)
        layer = arrays_of(partial)
        append_partial(as_array(keys.squeeze(2)), layer.offset, layer.key, layer.keys, token)

    def low_rank(self, down: Tensor, bias: Tensor, up: Tensor) -> AddLowRank:
        add_to_many = super().low_rank(down, bias, up)
        parts = as_array(down), as_array(bias), as_array(up)
        inputs_size, size = down.shape[1], up.shape[1]

        def add(projected: Tensor, inputs: Tensor) -> Tensor:
            if inputs.shape[1] > 1:  # a prompt's tokens: a matrix product is faster
                return add_to_many(projected, inputs)
            projected = projected.contiguous()
            read, written = as_arrays(inputs, projected)
            add_low_rank(read.reshape(-1, inputs_size), *parts, written.reshape(-1, size))
            return projected

        return add

    def _reserve_scores(self, jobs: int, group: int, tokens: int) -> None:
        have = self._scores.shape
        if have[0] < jobs or have[1] != group or have[2] < tokens:
            room = tokens + tokens // 2
            self._scores = np.empty((jobs, group, room), dtype=np.float32)
            self._margins = np.empty((jobs, room), dtype=np.float32)

    def _weight_room(self, rows: int, heads: int, group: int, columns: int) -> Array:
        """Scratch ``(rows, heads, group or more, >= columns)`` float32; see `attend`."""
        padded = 1 if group == 1 else -(-group // 4) * 4
        have = self._weights.shape
        if have[:3] != (rows, heads, padded) or have[3] < columns:
            shape = rows, heads, padded, columns + columns // 2
            self._weights = np.empty(shape, dtype=np.float32)
        return self._weights


def _tail(tail: Tail, rows: int, heads: int) -> tuple[Array | Codes | int, ...]:
    """As `attend` takes it."""
    partial, index = tail.partial, tail.index
    # compiled code does not look at where an array ends
    assert index.shape[:2] == partial.storage.shape[:2] == (rows, heads)
    marks = NO_MARKS
    if tail.allowed is not None:
        allowed = tail.allowed.expand(rows, -1)
        assert allowed.shape[1] == partial.length
        marks = allowed.to(torch.uint8).contiguous().numpy()
    layer, values = arrays_of(partial), value_arrays(tail.values)
    exact = index.contiguous().numpy()
    keys, codes = layer.keys, layer.codes
    return keys, codes, partial.length, layer.query, layer.height, *values, exact, marks


def _no_tail(like: Array) -> tuple[Array | Codes | int, ...]:
    """Nothing stands for the other tokens; ``like`` has the dtype of partial keys."""
    none = np.zeros((0, 0, 0, 0), dtype=np.float32)
    flat = np.zeros((0, 0, 0), dtype=np.float32)
    keys = np.zeros((0, 0, 0, 0), dtype=like.dtype)
    return keys, NO_CODES, 0, none, flat, flat, none, NO_INDEX, NO_MARKS


def _columns(weights: Array, counts: Array, columns: int) -> Tensor:
    """Group sums ``(B, H_kv, n + 1)``, the own token's last in every row."""
    sums = np.zeros((*weights.shape[:2], columns + 1), dtype=np.float32)
    for row, count in enumerate(counts.tolist()):
        sums[row, :, :count] = weights[row, :, :, :count].sum(axis=1)
        sums[row, :, columns] = weights[row, :, :, count].sum(axis=1)
    return torch.from_numpy(sums)
