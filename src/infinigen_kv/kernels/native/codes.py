"""Coded partial keys (`rehearsal.codes`) as numbers again, in compiled code."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from infinigen_kv.kernels.native.numbers import compiled, widen

BYTE, WORD, FLOAT = ir.IntType(8), ir.IntType(32), ir.FloatType()
GROUP = 64  # tokens that share a grid
AT_ONCE = 4 * GROUP  # tokens whose numbers, of 48 dimensions, stay in the second-level cache


@compiled
def unpack(codes: Any, row: int, head: int, start: int, stop: int, numbers: Any) -> None:
    """The partial keys of the tokens from ``start`` to ``stop``, whole groups, of one head.

    Parameters
    ----------
    codes
        As a tuple: lines ``(B, H_kv, groups, bytes)`` uint8, grids ``(B, H_kv, groups, 2, R)``
        bfloat16, and how many dimensions have 4 and 3 bits.
    numbers
        ``(R, >= stop - start)`` float32, written.
    """
    lines, grids, fours, threes = codes[0], codes[1], codes[2], codes[3]
    rank = grids.shape[4]
    pairs = 32 * fours
    singles = pairs + 16 * (rank - fours)
    for place in range(0, stop - start, GROUP):
        group = (start + place) // GROUP
        line, grid = lines[row, head, group], grids[row, head, group]
        for dim in range(rank):
            low, step = widen(grid[0, dim]), widen(grid[1, dim])
            lower, upper = pairs + 16 * (dim - fours), singles + 8 * (dim - fours)
            if dim < fours:
                spread_fours(line, 32 * dim, 0, numbers, dim, place, low, step)
            elif dim < fours + threes:
                spread_threes(line, lower, upper, numbers, dim, place, low, step)
            else:
                spread_twos(line, lower, 0, numbers, dim, place, low, step)


def _spreading(bits: int, *, upper: bool = False) -> Any:
    """Compiled code for 64 numbers of one dimension, ``numbers[dim, place:] = low + code step``.

    ``(line, start, start of the upper bits, numbers, dim, place, low, step)``. Written as vector
    instructions: a compiler has to assume that storing a number may change a byte of the line.
    """
    lanes = 8 * bits

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line, start, start_above, numbers, dim, place, low, step = arguments
        bytes_of = context.make_array(signature.args[0])(context, builder, line).data
        codes = _load(builder, builder.gep(bytes_of, [start]), lanes)
        above = _load(builder, builder.gep(bytes_of, [start_above]), 8, lanes) if upper else None
        array = context.make_array(signature.args[3])(context, builder, numbers)
        stride = builder.extract_value(array.strides, 0)
        first = builder.bitcast(array.data, BYTE.as_pointer())
        first = builder.gep(first, [builder.mul(stride, dim)])
        target = builder.gep(builder.bitcast(first, FLOAT.as_pointer()), [place])
        low, step = _every(builder, low, lanes), _every(builder, step, lanes)
        for part in range(GROUP // lanes):
            code = _bits(builder, codes, [part * bits] * lanes, (1 << bits) - 1)
            if above is not None:
                tokens = range(part * lanes, (part + 1) * lanes)
                bit = _bits(builder, above, [token // 8 for token in tokens], 1)
                code = builder.or_(code, builder.shl(bit, _constant([bits] * lanes)))
            number = builder.fmul(builder.sitofp(code, low.type), step, ("contract",))
            number = builder.fadd(low, number, ("contract",))
            spot = builder.gep(target, [ir.Constant(WORD, part * lanes)])
            store = builder.store(number, builder.bitcast(spot, number.type.as_pointer()))
            store.align = 4
        return context.get_dummy_value()

    @intrinsic
    def spread(
        typing_context: Any,
        line: Any,
        start: Any,
        start_above: Any,
        numbers: Any,
        dim: Any,
        place: Any,
        low: Any,
        step: Any,
    ) -> Any:
        whole = types.int64
        kinds = line, whole, whole, numbers, whole, whole, types.float32, types.float32
        return types.void(*kinds), generate

    return spread


def _load(builder: Any, source: Any, lanes: int, repeated: int | None = None) -> Any:
    """So many bytes in 32 bits each, over and over until there are ``repeated``."""
    kind = ir.VectorType(BYTE, lanes)
    loaded = builder.load(builder.bitcast(source, kind.as_pointer()))
    loaded.align = 1
    if repeated is not None:
        order = _constant([lane % lanes for lane in range(repeated)])
        loaded = builder.shuffle_vector(loaded, loaded, order)
    return builder.zext(loaded, ir.VectorType(WORD, repeated or lanes))


def _bits(builder: Any, words: Any, shifts: list[int], mask: int) -> Any:
    return builder.and_(builder.lshr(words, _constant(shifts)), _constant([mask] * len(shifts)))


def _constant(numbers: list[int]) -> Any:
    return ir.Constant(ir.VectorType(WORD, len(numbers)), numbers)


def _every(builder: Any, number: Any, lanes: int) -> Any:
    """A float in each lane."""
    empty = ir.Constant(ir.VectorType(FLOAT, lanes), ir.Undefined)
    first = builder.insert_element(empty, number, ir.Constant(WORD, 0))
    return builder.shuffle_vector(first, empty, _constant([0] * lanes))


spread_fours = _spreading(4)
spread_threes = _spreading(2, upper=True)
spread_twos = _spreading(2)
