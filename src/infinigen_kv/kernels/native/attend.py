"""Attention of one query per row over chosen entries where they lie, in compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np

from infinigen_kv.kernels.native.numbers import add, compiled, exponential, peak, store, widen
from infinigen_kv.kernels.native.tail import add_guess, add_tail, keep_real, mark

ZERO, ONE = np.float32(0), np.float32(1)


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
    tail: Any,
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
        As in `attention.dense.decode_attention`; a softcap of 0 for none.
    tail
        What stands for the other tokens (`rehearsal.tail`), as a tuple: partial keys, their codes
        and how many tokens they are (as in `choose.choose`), projection ``(B, H_kv, D, R)``, offset
        ``(B, H_kv, D)``, base ``(B, H_kv, D_v)``, slope ``(B, H_kv, R, D_v)``, the tokens ``(B,
        H_kv, n)`` int64 that are attended to exactly, and ``(B, length)`` uint8, 0 for those that
        no step attends to, or ``(0, 0)``. With R = 0 the others have no weight.
    weights
        ``(B, H_kv, 1 or a multiple of four >= G, >= max(counts) + 1)`` float32, written: the
        group's probabilities, the own token's after the others.
    output
        ``(B, H, D_v)``, written.
    """
    rows, kv_heads, padded, _ = weights.shape
    partial, codes, length, projection, offset, base, slope, exact, marks = tail
    rank = partial.shape[2]
    group = query.shape[1] // kv_heads
    dim, value_dim = query.shape[2], own_values.shape[2]
    scaled = np.zeros((padded, dim), np.float32)
    sums = np.empty(value_dim, np.float32)
    tops, totals = np.empty(group, np.float32), np.zeros(group, np.float32)
    moved = np.zeros((group, rank), np.float32)
    keep = np.ones(length if rank > 0 else 0, np.float32)
    everything = np.arange(np.max(counts) if index.shape[0] == 0 else 0)
    for job in range(rows * kv_heads):
        row, head = job // kv_heads, job % kv_heads
        count, first = counts[row], job * places
        chosen = index[row, head, :count] if index.shape[0] > 0 else everything[:count]
        for each in range(group):
            scale(query[row, head * group + each], scaling, scaled[each])
        lines = weights[row, head]
        if padded == 1:
            score_one(scaled[0], keys, key_stride, first, chosen, lines[0])
        else:
            score_four(scaled, keys, key_stride, first, chosen, lines)
        for each in range(group):
            lines[each, count] = dot(scaled[each], own_keys[row, head])
            tops[each] = capped_peak(lines[each, : count + 1], softcap)
        if rank > 0:
            if marks.shape[0] > 0:
                keep_real(keep, marks[row])
            mark(keep, exact[row, head, :count], ZERO)
            add_tail(
                scaled, projection[row, head], offset[row, head], partial[row, head], codes, row,
                head, length, keep, softcap, tops, totals, moved,
            )  # fmt: skip
            mark(keep, exact[row, head, :count], ONE)
        for each in range(group):
            share = softmax(lines[each, : count + 1], tops[each], totals[each])
            sums[:] = ZERO
            add_values(lines[each], values, value_stride, first, chosen, sums)
            add(lines[each, count], own_values[row, head], sums)
            if rank > 0:
                add_guess(totals[each], moved[each], share, base[row, head], slope[row, head], sums)
            put(output[row, head * group + each], sums)


@compiled
def scale(query: Any, scaling: np.float32, scaled: Any) -> None:
    for place in range(len(query)):
        scaled[place] = widen(query[place]) * scaling


@compiled
def put(output: Any, sums: Any) -> None:
    for place in range(len(sums)):
        store(output, place, sums[place])


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
def capped_peak(scores: Any, softcap: np.float32) -> Any:
    """The best score, after all were capped in place; NaN goes on through the exponential."""
    if softcap > 0:
        for number in range(len(scores)):
            scores[number] = np.tanh(scores[number] / softcap) * softcap
    return peak(scores)


@compiled
def softmax(scores: Any, top: np.float32, rest: np.float32) -> Any:
    """In place, beside others that weigh ``rest`` together; what the weights were divided by, as a
    factor. NaN goes on into the output, as in PyTorch's softmax.
    """
    total = rest
    for number in range(len(scores)):
        weight = exponential(scores[number] - top)
        scores[number] = weight
        total += weight
    share = ONE / total
    for number in range(len(scores)):
        scores[number] *= share
    return share
