"""Sums over the partial keys of one head ``(R, capacity)``, tokens last, in compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np

from infinigen_kv.kernels.native.numbers import compiled, store, widen

BLOCK = 512  # tokens whose partial keys stay in the first-level cache while they are summed
ZERO = np.float32(0)


@compiled
def project(query: Any, scaling: np.float32, projection: Any, partial: Any) -> None:
    """``partial = scaling * query projection`` of one head."""
    for each in range(query.shape[0]):
        sums = partial[each]
        sums[:] = np.float32(0)
        for place in range(query.shape[1]):
            number, line = widen(query[each, place]) * scaling, projection[place]
            for dim in range(len(sums)):
                sums[dim] += number * line[dim]


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
