"""Rehearsed scores, threshold, mean count and the best tokens, in compiled code.

The same rule as `rehearsal.select.select_tokens`, for one query per row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from infinigen_kv.kernels.native.codes import AT_ONCE, unpack
from infinigen_kv.kernels.native.numbers import NOTHING, compiled, partition, peak, widen
from infinigen_kv.kernels.native.partial_keys import BLOCK, project, score_one
from infinigen_kv.rehearsal import select

FORBIDDEN, KEPT = np.uint8(0), np.uint8(2)
NAN = np.float32(np.nan)
TIE_SHARE, TIE_LIMIT = np.float32(select.TIE_SHARE), np.float32(select.TIE_LIMIT)


@compiled
def select_tokens(
    query: Any,
    scaling: np.float32,
    projection: Any,
    offset: Any,
    keys: Any,
    codes: Any,
    length: int,
    softcap: np.float32,
    alpha: np.float32,
    marks: Any,
    first: int,
    last: int,
    bounds: Any,
    scores: Any,
    margins: Any,
) -> tuple[Any, Any, bool]:
    """The tokens of one step, per row and KV head.

    Parameters
    ----------
    query, scaling
        ``(B, H_kv, G, D)``, and what multiplies the scores.
    projection, offset
        Of the rehearsal, ``(B, H_kv, D, R)`` and ``(B, H_kv, D)`` float32. Only scores that are
        capped need the offset of the keys.
    keys, codes, length
        Partial keys of ``length`` tokens: the oldest as codes (`codes.unpack`, and how many tokens
        they are), the others ``(B, H_kv, R, >= length - coded)``.
    softcap
        As in `attention.dense.decode_attention`; 0 for none.
    alpha
        Distance from the best score within which a token is wanted.
    marks
        ``(B, length)`` uint8: 0 for tokens that may not be chosen, 2 for those always kept; or
        ``(0, 0)`` where all may be, and the ``first`` and the ``last`` ones are kept.
    bounds
        ``(B, 2)`` int64: least and largest count of a row.
    scores, margins
        Scratch, ``(B * H_kv, G, >= length)`` and ``(B * H_kv, >= length)`` float32.

    Returns
    -------
    tuple
        Indices ``(B, H_kv, n)`` int64, counts ``(B,)`` int64 (see `rehearsal.select.Selection`) and
        whether all scores were numbers and those chosen finite.
    """
    rows, heads, group, _ = query.shape
    partial = np.empty((group, projection.shape[3]), np.float32)
    wanted = np.zeros(rows * heads, np.int64)
    sound = True
    for job in range(rows * heads):
        row, head = job // heads, job % heads
        project(query[row, head], scaling, projection[row, head], partial)
        coded = codes[4]
        if coded > 0:
            score_coded(partial, codes, row, head, scores[job])
        score(partial, keys[row, head], length - coded, scores[job, :, coded:])
        if softcap > 0:
            cap(scores[job], length, query[row, head], scaling, offset[row, head], softcap)
        if marks.shape[0]:
            forbid(scores[job], marks[row], length)
        numbers = margin(scores[job], group, length, margins[job])
        if group > 1:
            rank_best(scores[job], group, length, margins[job])
        sound &= numbers or bounds[row, 1] == 0  # a row without any token has no scores
        if marks.shape[0]:
            keep_marked(margins[job], marks[row], length)
        else:
            keep_ends(margins[job], length, first, last)
        wanted[job] = count_above(margins[job], length, -alpha)
    counts = np.empty(rows, np.int64)
    for row in range(rows):
        mean = np.int64(np.rint(np.sum(wanted[row * heads : (row + 1) * heads]) / heads))
        counts[row] = min(max(mean, bounds[row, 0]), bounds[row, 1])
    chosen = np.zeros((rows, heads, np.max(counts)), np.int64)
    if sound:
        for job in range(rows * heads):
            row, head = job // heads, job % heads
            sound &= best(margins[job], length, wanted[job], counts[row], alpha, chosen[row, head])
    return chosen, counts, sound


@compiled
def score(query: Any, keys: Any, length: int, scores: Any) -> None:
    """``query @ keys`` of one head, block by block."""
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        for each in range(query.shape[0]):
            line = scores[each, start:stop]
            line[:] = np.float32(0)
            score_one(query[each], keys, start, stop, line)


@compiled
def score_coded(query: Any, codes: Any, row: int, head: int, scores: Any) -> None:
    """As `score`, of the tokens that are coded."""
    coded = codes[4]
    numbers = np.empty((query.shape[1], AT_ONCE), np.float32)
    for start in range(0, coded, AT_ONCE):
        stop = min(start + AT_ONCE, coded)
        unpack(codes, row, head, start, stop, numbers)
        for each in range(query.shape[0]):
            line = scores[each, start:stop]
            line[:] = np.float32(0)
            score_one(query[each], numbers, 0, stop - start, line)


@compiled
def cap(
    scores: Any,
    length: int,
    query: Any,
    scaling: np.float32,
    offset: Any,
    softcap: np.float32,
) -> None:
    for each in range(scores.shape[0]):
        constant = np.float32(0)
        for place in range(len(offset)):
            constant += widen(query[each, place]) * offset[place]
        for token in range(length):
            whole = (scores[each, token] + constant * scaling) / softcap
            # infinity, which a cap would hide, is reported like NaN
            scores[each, token] = np.tanh(whole) * softcap if np.isfinite(whole) else NAN


@compiled
def forbid(scores: Any, marks: Any, length: int) -> None:
    for each in range(scores.shape[0]):
        line = scores[each]
        for token in range(length):
            if marks[token] == FORBIDDEN:
                line[token] = NOTHING


@compiled
def margin(scores: Any, group: int, length: int, margins: Any) -> bool:
    """As `rehearsal.select.group_margin`, of one head; False where a score is NaN or +infinity."""
    sound = True
    for each in range(group):
        line = scores[each, :length]
        top, total = peak(line), np.float32(0)
        for token in range(length):
            total += line[token]  # NaN if a score is
        sound &= total == total and np.isfinite(top)
        found = margins[:length]
        if each == 0:
            for token in range(length):
                found[token] = line[token] - top
        else:
            for token in range(length):
                found[token] = max(found[token], line[token] - top)
    return sound


@compiled
def rank_best(scores: Any, group: int, length: int, margins: Any) -> None:
    """The order of those that are the best token of a query each."""
    tops = np.empty(group, np.float32)
    for each in range(group):
        tops[each] = peak(scores[each, :length])
    for token in range(length):
        if margins[token] == 0:
            total = np.float32(0)
            for each in range(group):
                total += scores[each, token] - tops[each]
            margins[token] = max(total * TIE_SHARE, -TIE_LIMIT)


@compiled
def keep_marked(margins: Any, marks: Any, length: int) -> None:
    for token in range(length):
        if marks[token] == KEPT:
            margins[token] = np.float32(np.inf)


@compiled
def keep_ends(margins: Any, length: int, first: int, last: int) -> None:
    margins[: min(first, length)] = np.float32(np.inf)
    margins[max(0, length - last) : length] = np.float32(np.inf)


@compiled
def count_above(margins: Any, length: int, limit: np.float32) -> Any:
    count = np.int32(0)
    line = margins[:length]
    for token in range(length):
        count += np.int32(line[token] > limit)
    return np.int64(count)


@compiled
def best(
    margins: Any, length: int, wanted: int, count: int, alpha: np.float32, chosen: Any
) -> bool:
    """The ``count`` tokens with the largest margins, in no order; False if fewer have one."""
    limit, found = -alpha, wanted
    step = max(alpha, np.float32(1))
    while found < count:  # a wider net; what may not be chosen is never in it
        limit = limit - step
        step *= np.float32(2)
        found = count_above(margins, length, limit)
        if limit == NOTHING and found < count:
            return False
    tokens = np.empty(found, np.int64)
    values = np.empty(found, np.float32)
    caught = 0
    for token in range(length):
        if margins[token] > limit:
            tokens[caught], values[caught] = token, margins[token]
            caught += 1
    partition(values, tokens, count)
    chosen[:count] = tokens[:count]
    return True
