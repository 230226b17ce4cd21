"""The low-rank correction of a predicted query, in compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np

from infinigen_kv.kernels.native.numbers import add, compiled, store, widen


@compiled
def add_low_rank(hidden: Any, down: Any, bias: Any, up: Any, query: Any) -> None:
    """``query += (hidden down^T + bias) up``, summed in float32.

    ``hidden`` ``(B, M)``, ``down`` ``(r, M)``, ``bias`` ``(r,)``, ``up`` ``(r, N)`` and ``query``
    ``(B, N)``, each of them float32 or the bits of bfloat16.
    """
    rows, width = hidden.shape
    rank, outputs = up.shape
    inputs = np.empty(width, np.float32)
    narrow = np.empty(rank, np.float32)
    sums = np.empty(outputs, np.float32)
    for row in range(rows):
        for place in range(width):
            inputs[place] = widen(hidden[row, place])
        shrink(inputs, down, bias, narrow)
        for place in range(outputs):
            sums[place] = widen(query[row, place])
        spread(narrow, up, sums)
        for place in range(outputs):
            store(query[row], place, sums[place])


@compiled
def shrink(inputs: Any, down: Any, bias: Any, narrow: Any) -> None:
    """``narrow = down inputs + bias``, four lines at a time."""
    rank, width = down.shape
    whole = rank // 4 * 4
    for first in range(0, whole, 4):
        line0, line1 = down[first], down[first + 1]
        line2, line3 = down[first + 2], down[first + 3]
        sum0, sum1 = np.float32(0), np.float32(0)
        sum2, sum3 = np.float32(0), np.float32(0)
        for place in range(width):
            number = inputs[place]
            sum0 += number * widen(line0[place])
            sum1 += number * widen(line1[place])
            sum2 += number * widen(line2[place])
            sum3 += number * widen(line3[place])
        narrow[first], narrow[first + 1] = sum0, sum1
        narrow[first + 2], narrow[first + 3] = sum2, sum3
    for each in range(whole, rank):
        total, line = np.float32(0), down[each]
        for place in range(width):
            total += inputs[place] * widen(line[place])
        narrow[each] = total
    for each in range(rank):
        narrow[each] += widen(bias[each])


@compiled
def spread(narrow: Any, up: Any, sums: Any) -> None:
    """``sums += narrow up``, four lines at a time."""
    rank, outputs = up.shape
    whole = rank // 4 * 4
    for first in range(0, whole, 4):
        weight0, weight1 = narrow[first], narrow[first + 1]
        weight2, weight3 = narrow[first + 2], narrow[first + 3]
        line0, line1 = up[first], up[first + 1]
        line2, line3 = up[first + 2], up[first + 3]
        for place in range(outputs):
            sums[place] += (
                weight0 * widen(line0[place])
                + weight1 * widen(line1[place])
                + weight2 * widen(line2[place])
                + weight3 * widen(line3[place])
            )
    for each in range(whole, rank):
        add(narrow[each], up[each], sums)
