"""A kernel that reads rows of pinned host memory by index, straight over the bus (Triton).

The device then fetches what a selection names without the host's help: no index on the host, no
staging. Needs `triton`, which PyTorch's CUDA builds for Linux bring along.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

_UNITS = (torch.int64, torch.int32, torch.int16)  # the widest that divides a row is loaded at once


@triton.jit
def _gather_kernel(source, index, target, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(index + line)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    units = tl.load(source + row * width + columns, mask=inside)
    tl.store(target + line * width + columns, units, mask=inside)


def gather_rows(source: Tensor, index: Tensor, target: Tensor) -> None:
    """``target[i] = source[index[i]]``, queued on the current stream of the target's device.

    Parameters
    ----------
    source
        ``(rows, E)`` uint8, contiguous, in pinned host memory.
    index
        ``(n,)`` int64 on the device, each within the rows.
    target
        ``(n, E)`` uint8, contiguous, on the device.

    Raises
    ------
    RuntimeError
        Where Triton cannot compile or start the kernel.
    """
    if index.numel() == 0:
        return
    unit = next((each for each in _UNITS if source.shape[1] % each.itemsize == 0), torch.uint8)
    source, target = source.view(unit), target.view(unit)
    width = source.shape[1]
    block = triton.next_power_of_2(width)
    try:
        _gather_kernel[(index.numel(),)](source, index, target, width, BLOCK=block)
    except TritonError as error:
        raise RuntimeError(f"the gather kernel cannot be compiled: {error}") from error
