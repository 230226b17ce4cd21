"""PyTorch's tensors as NumPy arrays that share their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


def as_array(tensor: Tensor) -> Array:
    """The same memory; a copy where it is not contiguous. bfloat16 becomes its bits."""
    # asking costs less than calls that change nothing, and a step makes hundreds of arrays
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def as_arrays(*tensors: Tensor) -> list[Array]:
    """`as_array` of each, in one call."""
    arrays = []
    for tensor in tensors:
        if tensor.requires_grad or not tensor.is_contiguous():
            arrays.append(as_array(tensor))
        elif tensor.dtype == torch.bfloat16:
            arrays.append(tensor.view(torch.uint16).numpy())
        else:
            arrays.append(tensor.numpy())
    return arrays


def as_flat(keys: Tensor, values: Tensor) -> tuple[Array, int, Array, int, int]:
    """Keys ``(B, H, n, D)`` and values ``(B, H, n, D_v)`` as flat memory.

    Returns
    -------
    tuple
        Keys, the numbers from one to the next, values, the numbers from one to the next, and the
        vectors from one head to the next, which are as many in both.
    """
    if keys.is_contiguous() and values.is_contiguous():
        flat_keys, flat_values = as_arrays(keys, values)
        widths = keys.shape[3], values.shape[3]
        return flat_keys.reshape(-1), widths[0], flat_values.reshape(-1), widths[1], keys.shape[2]
    of_keys, of_values = _layout(keys), _layout(values)
    if of_keys is None or of_values is None or of_keys[1] != of_values[1]:
        keys, values = keys.contiguous(), values.contiguous()
        count = keys.shape[2]
        of_keys, of_values = (keys.shape[3], count), (values.shape[3], count)
    return _span(keys, *of_keys), of_keys[0], _span(values, *of_values), *of_values


def _layout(vectors: Tensor) -> tuple[int, int] | None:
    """Numbers from one vector to the next, and vectors from one head to the next; None if uneven.

    What an axis of length 1 says of itself means nothing.
    """
    rows, heads, count, _ = vectors.shape
    row, head, step, number = vectors.stride()
    if rows * heads == 1:
        head = count * step
    elif heads == 1:
        head = row
    if count == 1:
        step = head
    even = number == 1 and step > 0 and head % step == 0 and (rows == 1 or row == heads * head)
    return (step, head // step) if even else None


def _span(vectors: Tensor, step: int, places: int) -> Array:
    rows, heads, count, width = vectors.shape
    length = ((rows * heads - 1) * places + count - 1) * step + width if count else 0
    return as_array(vectors.as_strided((length,), (1,)))
