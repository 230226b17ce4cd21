"""Attention of one query per row over chosen entries where they lie, in compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np

from infinigen_kv.native.numbers import compiled, exponential, peak, store, widen

ZERO = np.float32(0)


@compiled
def attend(
    query: Any,
    keys: Any,
    key_stride: int,
    values: Any,
    value_stride: int,
    places: int,
    index: Any,
    counts: Any,
    own_keys: Any,
    own_values: Any,
    scaling: np.float32,
    softcap: np.float32,
    weights: Any,
    output: Any,
) -> None:
    """Softmax attention over ``counts`` entries of each row and the query's own token.

    Parameters
    ----------
    query, own_keys, own_values
        ``(B, H, D)``, ``(B, H_kv, D)`` and ``(B, H_kv, D_v)``.
    keys, values
        Flat: the key in place p of row b and head h starts at ``((b * H_kv + h) * places + p) *
        key_stride``, and values likewise.
    index
        ``(B, H_kv, n)`` int64 places, or ``(0, 0, 0)`` for the first ``counts`` ones.
    counts
        ``(B,)`` int64.
    scaling, softcap
        As in `attention.decode_attention`; a softcap of 0 for none.
    weights
        ``(B, H_kv, 1 or a multiple of four >= G, >= max(counts) + 1)`` float32, written: the
        group's probabilities, the own token's after the others.
    output
        ``(B, H, D_v)``, written.
    """
    rows, kv_heads, padded, _ = weights.shape
    group = query.shape[1] // kv_heads
    dim, value_dim = query.shape[2], own_values.shape[2]
    scaled = np.zeros((padded, dim), np.float32)
    sums = np.empty((group, value_dim), np.float32)
    everything = np.arange(np.max(counts) if index.shape[0] == 0 else 0)
    for job in range(rows * kv_heads):
        row, head = job // kv_heads, job % kv_heads
        count, base = counts[row], job * places
        chosen = index[row, head, :count] if index.shape[0] > 0 else everything[:count]
        for each in range(group):
            for place in range(dim):
                scaled[each, place] = widen(query[row, head * group + each, place]) * scaling
        lines = weights[row, head]
        if padded == 1:
            score_one(scaled[0], keys, key_stride, base, chosen, lines[0])
        else:
            score_four(scaled, keys, key_stride, base, chosen, lines)
        for each in range(group):
            lines[each, count] = dot(scaled[each], own_keys[row, head])
            softmax(lines[each], count + 1, softcap)
        sums[:] = np.float32(0)
        for each in range(group):
            add_values(lines[each], values, value_stride, base, chosen, sums[each])
            add(lines[each, count], own_values[row, head], sums[each])
            for place in range(value_dim):
                store(output[row, head * group + each], place, sums[each, place])


@compiled
def score_one(query: Any, keys: Any, stride: int, base: int, chosen: Any, line: Any) -> None:
    """Products of one query with the chosen keys, four keys at a time."""
    dim, count = len(query), len(chosen)
    whole = count // 4 * 4
    for first in range(0, whole, 4):
        start0, start1 = (base + chosen[first]) * stride, (base + chosen[first + 1]) * stride
        start2, start3 = (base + chosen[first + 2]) * stride, (base + chosen[first + 3]) * stride
        key0, key1 = keys[start0 : start0 + dim], keys[start1 : start1 + dim]
        key2, key3 = keys[start2 : start2 + dim], keys[start3 : start3 + dim]
        sum0, sum1, sum2, sum3 = ZERO, ZERO, ZERO, ZERO
        for place in range(dim):
            number = query[place]
            sum0 += number * widen(key0[place])
            sum1 += number * widen(key1[place])
            sum2 += number * widen(key2[place])
            sum3 += number * widen(key3[place])
        line[first], line[first + 1] = sum0, sum1
        line[first + 2], line[first + 3] = sum2, sum3
    for number in range(whole, count):
        start = (base + chosen[number]) * stride
        line[number] = dot(query, keys[start : start + dim])


@compiled
def score_four(queries: Any, keys: Any, stride: int, base: int, chosen: Any, lines: Any) -> None:
    """Products of a multiple of four queries with the chosen keys, each of which is read once for
    four queries.
    """
    padded, dim = queries.shape
    for first in range(0, padded, 4):
        query0, query1 = queries[first], queries[first + 1]
        query2, query3 = queries[first + 2], queries[first + 3]
        for number in range(len(chosen)):
            start = (base + chosen[number]) * stride
            key = keys[start : start + dim]
            sum0, sum1, sum2, sum3 = ZERO, ZERO, ZERO, ZERO
            for place in range(dim):
                factor = widen(key[place])
                sum0 += query0[place] * factor
                sum1 += query1[place] * factor
                sum2 += query2[place] * factor
                sum3 += query3[place] * factor
            lines[first, number], lines[first + 1, number] = sum0, sum1
            lines[first + 2, number], lines[first + 3, number] = sum2, sum3


@compiled
def add_values(line: Any, values: Any, stride: int, base: int, chosen: Any, sums: Any) -> None:
    """Add the chosen values times their weights to ``sums``, four values at a time."""
    dim, count = len(sums), len(chosen)
    whole = count // 4 * 4
    for first in range(0, whole, 4):
        start0, start1 = (base + chosen[first]) * stride, (base + chosen[first + 1]) * stride
        start2, start3 = (base + chosen[first + 2]) * stride, (base + chosen[first + 3]) * stride
        value0, value1 = values[start0 : start0 + dim], values[start1 : start1 + dim]
        value2, value3 = values[start2 : start2 + dim], values[start3 : start3 + dim]
        weight0, weight1 = line[first], line[first + 1]
        weight2, weight3 = line[first + 2], line[first + 3]
        for place in range(dim):
            sums[place] += (
                weight0 * widen(value0[place])
                + weight1 * widen(value1[place])
                + weight2 * widen(value2[place])
                + weight3 * widen(value3[place])
            )
    for number in range(whole, count):
        start = (base + chosen[number]) * stride
        add(line[number], values[start : start + dim], sums)


@compiled
def dot(query: Any, key: Any) -> Any:
    total = ZERO
    for place in range(len(query)):
        total += query[place] * widen(key[place])
    return total


@compiled
def add(weight: np.float32, value: Any, sums: Any) -> None:
    for place in range(len(sums)):
        sums[place] += weight * widen(value[place])


@compiled
def softmax(line: Any, count: int, softcap: np.float32) -> None:
    """In place. NaN goes on into the output, as in PyTorch's softmax."""
    scores = line[:count]
    if softcap > 0:
        for number in range(count):
            scores[number] = np.tanh(scores[number] / softcap) * softcap
    top = peak(scores)  # NaN goes on through the exponential
    total = np.float32(0)
    for number in range(count):
        weight = exponential(scores[number] - top)
        scores[number] = weight
        total += weight
    share = np.float32(1) / total
    for number in range(count):
        scores[number] *= share


@compiled
def append_partial(keys: Any, offset: Any, projection: Any, partial: Any, token: int) -> None:
    """``partial[..., token] = (keys - offset) projection``.

    ``keys`` ``(B, H_kv, D)``, ``offset`` ``(B, H_kv, D)`` float32, ``projection``
    ``(B, H_kv, D, R)`` float32, ``partial`` ``(B, H_kv, R, capacity)``.
    """
    rows, heads, dim, rank = projection.shape
    sums = np.empty(rank, np.float32)
    for row in range(rows):
        for head in range(heads):
            sums[:] = np.float32(0)
            for place in range(dim):
                number = widen(keys[row, head, place]) - offset[row, head, place]
                line = projection[row, head, place]
                for each in range(rank):
                    sums[each] += number * line[each]
            for each in range(rank):
                store(partial[row, head, each], token, sums[each])
