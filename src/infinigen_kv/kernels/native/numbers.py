"""Numbers in compiled code: bfloat16 is handled as the bits of a uint16."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

# No flag that lets the compiler assume that NaN and infinity do not occur: they are reported.
FAST = {"reassoc", "contract", "nsz", "arcp"}

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, but only compiled code can read bfloat16")


def _state() -> str:
    """A digest of the compiled code's sources."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(each.read_bytes() for each in sources)).hexdigest()[:16]


STATE = _state()


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function on its first call, and keep the result on disk where there is room.

    It is kept under a name that tells the state of this folder: numba looks for changes only in the
    function's own file, but has inlined what that imports from others.
    """
    function.__qualname__ += f"_{STATE}"
    compiler = partial(numba.njit, fastmath=FAST, nogil=True, error_model="numpy")
    try:
        return compiler(cache=True)(function)
    except RuntimeError:  # neither beside the sources nor in the user's own folder
        return compiler(cache=False)(function)


LANES = 64
NOTHING = np.float32(-np.inf)
LOG2_E = np.float32(1.4426950408889634)
LOWEST_POWER = np.float32(-126.0)  # of two, in a normal float32


@intrinsic
def widen(typing_context: Any, number: Any) -> Any:
    """The float32 of a float32, or of the bits of a bfloat16."""
    if number not in (types.uint16, types.float32):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if number == types.float32:
            return arguments[0]
        bits = builder.zext(arguments[0], ir.IntType(32))
        shifted = builder.shl(bits, ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(shifted, ir.FloatType())

    return types.float32(number), generate


@intrinsic
def bits_of(typing_context: Any, number: Any) -> Any:
    """The bits of a float32 as uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def from_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 that has these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


def store(target: Any, place: int, number: np.float32) -> None:
    """``target[place] = number``; rounded to the nearest even where the bits of a bfloat16."""
    raise NotImplementedError("only compiled code can call this")


@overload(store)
def _store(target: Any, place: Any, number: Any) -> Callable[[Any, Any, Any], None]:
    if target.dtype == types.uint16:

        def put(target: Any, place: Any, number: Any) -> None:
            bits = bits_of(number)
            if number != number:
                target[place] = np.uint16(0x7FC0)
            else:
                odd = (bits >> np.uint32(16)) & np.uint32(1)
                target[place] = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    else:

        def put(target: Any, place: Any, number: Any) -> None:
            target[place] = number

    return put


@compiled
def exponential(number: np.float32) -> np.float32:
    """The exponential of a number <= 0, to a relative error of 1e-6 near 0 and 5e-6 far down; NaN
    stays NaN.

    A polynomial instead of the C library's function: a loop over it becomes vector instructions.
    """
    power = max(number * LOG2_E, LOWEST_POWER)
    whole = np.floor(power)
    rest = (power - whole) * np.float32(0.6931471805599453)
    value = np.float32(1.0 / 5040.0)
    value = value * rest + np.float32(1.0 / 720.0)
    value = value * rest + np.float32(1.0 / 120.0)
    value = value * rest + np.float32(1.0 / 24.0)
    value = value * rest + np.float32(1.0 / 6.0)
    value = value * rest + np.float32(0.5)
    value = value * rest + np.float32(1.0)
    value = value * rest + np.float32(1.0)
    scale = from_bits(np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)))
    if number < np.float32(-87.0):
        return np.float32(0.0)
    return value * scale if number == number else number


@compiled
def add(weight: np.float32, value: Any, sums: Any) -> None:
    """``sums += weight * value``."""
    for place in range(len(sums)):
        sums[place] += weight * widen(value[place])


@compiled
def peak(line: Any) -> Any:
    """The largest number, NaN left out. In lanes, since a compiler that minds NaN makes no vectors
    of a maximum over one line.
    """
    lanes = np.full(LANES, NOTHING, np.float32)
    whole = len(line) // LANES * LANES
    for start in range(0, whole, LANES):
        part = line[start : start + LANES]
        for lane in range(LANES):
            lanes[lane] = part[lane] if part[lane] > lanes[lane] else lanes[lane]
    top = NOTHING
    for lane in range(LANES):
        top = max(top, lanes[lane])
    for token in range(whole, len(line)):
        top = max(top, line[token])
    return top


@compiled
def partition(values: Any, names: Any, count: int) -> None:
    """Move the ``count`` largest values, with their names, to the front (Hoare's quickselect)."""
    low, high = 0, len(values) - 1
    while low < high:
        pivot = values[(low + high) // 2]
        left, right = low, high
        while left <= right:
            while values[left] > pivot:
                left += 1
            while values[right] < pivot:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                names[left], names[right] = names[right], names[left]
                left += 1
                right -= 1
        if count - 1 <= right:
            high = right
        elif count - 1 >= left:
            low = left
        else:
            break
