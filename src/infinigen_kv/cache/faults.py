"""Faults of a device: what PyTorch raises when it is gone, and what this package makes of it."""

from __future__ import annotations

import torch

from infinigen_kv.errors import DeviceError

SIGNS = ("CUDA error", "HIP error", "device-side assert", "device lost")
ACCELERATOR_ERROR: type[RuntimeError] | None = getattr(torch, "AcceleratorError", None)


def is_device_fault(error: BaseException | None) -> bool:
    """Whether an error says that the device works no longer, so that its memory is lost.

    Running out of memory is no such fault. PyTorch before 2.8 has no type of its own for it.
    """
    if isinstance(error, DeviceError):
        return True
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    if ACCELERATOR_ERROR is not None and isinstance(error, ACCELERATOR_ERROR):
        return True
    return any(sign in str(error) for sign in SIGNS)


def device_error(error: RuntimeError, device: torch.device) -> DeviceError | None:
    """What to raise instead of an error of a computation on ``device``; None for that error."""
    if isinstance(error, DeviceError) or not is_device_fault(error):
        return None
    first_line = str(error).strip().partition("\n")[0]
    return DeviceError(
        f"the device {device} stopped working ({first_line}); the KV on it is lost: check the "
        "device, start the process again, and read the prompt into a new cache"
    )
