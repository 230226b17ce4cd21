"""The estimate of the tokens that a step leaves behind (`rehearsal.tail`), in compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np

from infinigen_kv.native.numbers import compiled, exponential, widen

BLOCK = 512  # tokens whose partial keys stay in the first-level cache for scores and sums
ZERO = np.float32(0)
NAN = np.float32(np.nan)


@compiled
def add_tail(
    query: Any,
    projection: Any,
    offset: Any,
    keys: Any,
    length: int,
    keep: Any,
    softcap: np.float32,
    tops: Any,
    totals: Any,
    moved: Any,
) -> None:
    """Weights of one head's tail, and its partial keys times these.

    Parameters
    ----------
    query
        ``(>= G, D)`` float32, scaled.
    projection, offset
        ``(D, R)`` and ``(D,)`` float32, of the rehearsal.
    keys, length
        Partial keys ``(R, capacity)``, of which the first ``length`` tokens count.
    keep
        ``(>= length,)`` float32, 1 for the tokens of the tail and 0 for others.
    softcap
        As in `attention.decode_attention`; 0 for none.
    tops
        ``(G,)`` float32: the best scores among the tokens that are attended to exactly, which none
        of the tail exceeds.
    totals
        ``(G,)`` float32, written: the tail's weights, relative to the exponential of the top.
    moved
        ``(G, R)`` float32, written: the sums of partial keys times weights.
    """
    group, rank = moved.shape
    partial = np.zeros((group, rank), np.float32)
    constant = np.zeros(group, np.float32)
    for each in range(group):
        for place in range(query.shape[1]):
            number, line = query[each, place], projection[place]
            constant[each] += number * offset[place]
            for dim in range(rank):
                partial[each, dim] += number * line[dim]
    totals[:] = ZERO
    moved[:] = ZERO
    weights = np.empty((2, BLOCK), np.float32)
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        kept = keep[start:stop]
        first, second = weights[0, : stop - start], weights[1, : stop - start]
        each = 0
        while each + 2 <= group:  # two queries at a time: a key is widened once for both
            first[:], second[:] = constant[each], constant[each + 1]
            score_two(partial[each], partial[each + 1], keys, start, stop, first, second)
            totals[each] += weigh(first, tops[each], kept, softcap)
            totals[each + 1] += weigh(second, tops[each + 1], kept, softcap)
            add_two(first, second, keys, start, stop, moved[each], moved[each + 1])
            each += 2
        if each < group:
            first[:] = constant[each]
            score_one(partial[each], keys, start, stop, first)
            totals[each] += weigh(first, tops[each], kept, softcap)
            add_one(first, keys, start, stop, moved[each])


@compiled
def score_one(query: Any, keys: Any, start: int, stop: int, line: Any) -> None:
    """Add the scores of the tokens from ``start`` to ``stop``, four dimensions at a time."""
    dims = len(query)
    whole = dims // 4 * 4
    for dim in range(0, whole, 4):
        weight0, weight1 = query[dim], query[dim + 1]
        weight2, weight3 = query[dim + 2], query[dim + 3]
        keys0, keys1 = keys[dim, start:stop], keys[dim + 1, start:stop]
        keys2, keys3 = keys[dim + 2, start:stop], keys[dim + 3, start:stop]
        for token in range(stop - start):
            line[token] += (
                weight0 * widen(keys0[token])
                + weight1 * widen(keys1[token])
                + weight2 * widen(keys2[token])
                + weight3 * widen(keys3[token])
            )
    for dim in range(whole, dims):
        weight0, keys0 = query[dim], keys[dim, start:stop]
        for token in range(stop - start):
            line[token] += weight0 * widen(keys0[token])


@compiled
def score_two(
    query_a: Any, query_b: Any, keys: Any, start: int, stop: int, line_a: Any, line_b: Any
) -> None:
    """As `score_one`, for two queries."""
    dims = len(query_a)
    whole = dims // 4 * 4
    for dim in range(0, whole, 4):
        a0, a1, a2, a3 = query_a[dim], query_a[dim + 1], query_a[dim + 2], query_a[dim + 3]
        b0, b1, b2, b3 = query_b[dim], query_b[dim + 1], query_b[dim + 2], query_b[dim + 3]
        keys0, keys1 = keys[dim, start:stop], keys[dim + 1, start:stop]
        keys2, keys3 = keys[dim + 2, start:stop], keys[dim + 3, start:stop]
        for token in range(stop - start):
            key0, key1 = widen(keys0[token]), widen(keys1[token])
            key2, key3 = widen(keys2[token]), widen(keys3[token])
            line_a[token] += a0 * key0 + a1 * key1 + a2 * key2 + a3 * key3
            line_b[token] += b0 * key0 + b1 * key1 + b2 * key2 + b3 * key3
    for dim in range(whole, dims):
        keys0 = keys[dim, start:stop]
        for token in range(stop - start):
            line_a[token] += query_a[dim] * widen(keys0[token])
            line_b[token] += query_b[dim] * widen(keys0[token])


@compiled
def weigh(line: Any, top: np.float32, kept: Any, softcap: np.float32) -> Any:
    """Scores become weights, 0 for what is no part of the tail; their sum."""
    if softcap > 0:
        for token in range(len(line)):
            # infinity, which a cap would hide, is reported like NaN
            capped = np.tanh(line[token] / softcap) * softcap
            line[token] = capped if np.isfinite(line[token]) else NAN
    total = ZERO
    for token in range(len(line)):
        above = line[token] - top
        weight = exponential(ZERO if above > ZERO else above)  # NaN goes on
        weight = weight if kept[token] > ZERO else ZERO
        line[token] = weight
        total += weight
    return total


@compiled
def add_one(line: Any, keys: Any, start: int, stop: int, moved: Any) -> None:
    """``moved += keys line``, four partial dimensions at a time."""
    dims = len(moved)
    whole = dims // 4 * 4
    for dim in range(0, whole, 4):
        keys0, keys1 = keys[dim, start:stop], keys[dim + 1, start:stop]
        keys2, keys3 = keys[dim + 2, start:stop], keys[dim + 3, start:stop]
        sum0, sum1, sum2, sum3 = ZERO, ZERO, ZERO, ZERO
        for token in range(stop - start):
            weight = line[token]
            sum0 += weight * widen(keys0[token])
            sum1 += weight * widen(keys1[token])
            sum2 += weight * widen(keys2[token])
            sum3 += weight * widen(keys3[token])
        moved[dim] += sum0
        moved[dim + 1] += sum1
        moved[dim + 2] += sum2
        moved[dim + 3] += sum3
    for dim in range(whole, dims):
        total, keys0 = ZERO, keys[dim, start:stop]
        for token in range(stop - start):
            total += line[token] * widen(keys0[token])
        moved[dim] += total


@compiled
def add_two(
    line_a: Any, line_b: Any, keys: Any, start: int, stop: int, moved_a: Any, moved_b: Any
) -> None:
    """As `add_one`, for two queries."""
    dims = len(moved_a)
    whole = dims // 4 * 4
    for dim in range(0, whole, 4):
        keys0, keys1 = keys[dim, start:stop], keys[dim + 1, start:stop]
        keys2, keys3 = keys[dim + 2, start:stop], keys[dim + 3, start:stop]
        a0, a1, a2, a3 = ZERO, ZERO, ZERO, ZERO
        b0, b1, b2, b3 = ZERO, ZERO, ZERO, ZERO
        for token in range(stop - start):
            key0, key1 = widen(keys0[token]), widen(keys1[token])
            key2, key3 = widen(keys2[token]), widen(keys3[token])
            weight_a, weight_b = line_a[token], line_b[token]
            a0 += weight_a * key0
            a1 += weight_a * key1
            a2 += weight_a * key2
            a3 += weight_a * key3
            b0 += weight_b * key0
            b1 += weight_b * key1
            b2 += weight_b * key2
            b3 += weight_b * key3
        moved_a[dim] += a0
        moved_a[dim + 1] += a1
        moved_a[dim + 2] += a2
        moved_a[dim + 3] += a3
        moved_b[dim] += b0
        moved_b[dim + 1] += b1
        moved_b[dim + 2] += b2
        moved_b[dim + 3] += b3
    if whole < dims:
        add_one(line_a, keys[whole:], start, stop, moved_a[whole:])
        add_one(line_b, keys[whole:], start, stop, moved_b[whole:])


@compiled
def mark(keep: Any, chosen: Any, value: np.float32) -> None:
    """``keep[chosen] = value``."""
    for number in range(len(chosen)):
        keep[chosen[number]] = value
