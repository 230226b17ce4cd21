"""The estimate of the tokens that a step leaves behind (`rehearsal.tail`), in compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np

from infinigen_kv.kernels.native.codes import AT_ONCE, unpack
from infinigen_kv.kernels.native.numbers import add, compiled, exponential
from infinigen_kv.kernels.native.partial_keys import (
    BLOCK,
    add_one,
    add_two,
    project,
    score_one,
    score_two,
)

ZERO, ONE = np.float32(0), np.float32(1)
NAN = np.float32(np.nan)


@compiled
def add_tail(
    query: Any,
    projection: Any,
    offset: Any,
    keys: Any,
    codes: Any,
    row: int,
    head: int,
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
    keys, codes, row, head, length
        Partial keys of ``length`` tokens of this head: ``keys`` ``(R, capacity)`` and ``codes`` as
        in `choose.choose`.
    keep
        ``(>= length,)`` float32, 1 for the tokens of the tail and 0 for others.
    softcap
        As in `attention.dense.decode_attention`; 0 for none.
    tops
        ``(G,)`` float32: the best scores among the tokens that are attended to exactly, which none
        of the tail exceeds.
    totals
        ``(G,)`` float32, written: the tail's weights, relative to the exponential of the top.
    moved
        ``(G, R)`` float32, written: the sums of partial keys times weights.
    """
    group, rank = moved.shape
    partial = np.empty((group, rank), np.float32)
    project(query[:group], ONE, projection, partial)
    constant = np.zeros(group, np.float32)
    for each in range(group):
        for place in range(len(offset)):
            constant[each] += query[each, place] * offset[place]
    totals[:] = ZERO
    moved[:] = ZERO
    weights = np.empty((2, BLOCK), np.float32)
    coded = codes[4]
    if coded > 0:
        numbers = np.empty((rank, AT_ONCE), np.float32)
        for start in range(0, coded, AT_ONCE):
            stop = min(start + AT_ONCE, coded)
            unpack(codes, row, head, start, stop, numbers)
            add_block(
                partial, constant, numbers, 0, stop - start, keep[start:stop], softcap, tops,
                weights, totals, moved,
            )  # fmt: skip
    for start in range(0, length - coded, BLOCK):
        stop = min(start + BLOCK, length - coded)
        add_block(
            partial, constant, keys, start, stop, keep[coded + start : coded + stop], softcap, tops,
            weights, totals, moved,
        )  # fmt: skip


@compiled
def add_block(
    partial: Any,
    constant: Any,
    keys: Any,
    start: int,
    stop: int,
    kept: Any,
    softcap: np.float32,
    tops: Any,
    weights: Any,
    totals: Any,
    moved: Any,
) -> None:
    """Add the tokens from ``start`` to ``stop`` of ``keys`` to ``totals`` and ``moved``.

    ``partial`` ``(G, R)`` and ``constant`` ``(G,)`` are the queries', ``weights`` is scratch.
    """
    group = len(constant)
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
def keep_real(keep: Any, marks: Any) -> None:
    """1 for the tokens of a row that may be attended to, 0 for the others."""
    for token in range(len(marks)):
        keep[token] = ONE if marks[token] > 0 else ZERO


@compiled
def mark(keep: Any, chosen: Any, value: np.float32) -> None:
    """``keep[chosen] = value``."""
    for number in range(len(chosen)):
        keep[chosen[number]] = value


@compiled
def add_guess(
    weight: np.float32, moved: Any, share: np.float32, base: Any, slope: Any, sums: Any
) -> None:
    """Add the values of a tail of this ``weight`` (`rehearsal.tail.ValueMap`), times ``share``."""
    add(weight * share, base, sums)
    for number in range(len(moved)):
        add(moved[number] * share, slope[number], sums)
