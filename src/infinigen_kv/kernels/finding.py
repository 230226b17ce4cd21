"""Which kernels a cache gets: compiled where they can be had, else plain PyTorch."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Literal, get_args

import torch

from infinigen_kv.errors import InputError
from infinigen_kv.kernels.base import Kernels
from infinigen_kv.kernels.reference import TorchKernels

KernelsName = Literal["auto", "native", "torch"]
KERNELS: tuple[KernelsName, ...] = get_args(KernelsName)
NATIVE_DTYPES = (torch.float32, torch.bfloat16)


def find_kernels(name: KernelsName, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels for a cache.

    ``auto`` takes the native ones on a CPU where numba is installed and the dtype is float32 or
    bfloat16, and says once where numba is missing.

    Raises
    ------
    InputError
        If ``native`` is asked for and cannot be had.
    """
    if name not in KERNELS:
        raise InputError(f"kernels={name!r} is not valid: it must be one of {', '.join(KERNELS)}")
    fits = device.type == "cpu" and dtype in NATIVE_DTYPES
    if name == "native" and not fits:
        raise InputError(
            f"kernels='native' computes on a CPU in float32 or bfloat16, but the model is on "
            f"{device} in {str(dtype).removeprefix('torch.')}: use kernels='auto'"
        )
    if name == "torch" or not fits:
        return TorchKernels()
    native = _native_kernels()
    if not isinstance(native, str):
        return native()
    if name == "native":
        raise InputError(
            f"kernels='native' needs numba, which cannot be used ({native}): pip install "
            "'infinigen-kv[native]', or use kernels='torch'"
        )
    _warn_slow(native)
    return TorchKernels()


@cache
def _native_kernels() -> type[Kernels] | str:
    """The native kernels, or why there are none."""
    try:
        from infinigen_kv.kernels.native.kernels import NativeKernels
    except (ImportError, OSError) as error:  # OSError: a library of its compiler cannot be loaded
        return str(error)
    return NativeKernels


@cache  # once
def _warn_slow(reason: str) -> None:
    warnings.warn(
        f"numba cannot be used ({reason}), so decode steps run slower PyTorch code: pip install "
        "'infinigen-kv[native]'",
        stacklevel=3,
    )
