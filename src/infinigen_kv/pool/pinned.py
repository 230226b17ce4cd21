"""Pinned host memory within a budget, from which a CUDA device copies without a detour."""

from __future__ import annotations

import logging
import math
import os
import weakref
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


class HostMemory:
    """Gives out host memory: pinned while the budget lasts and the system allows it, else pageable.

    Pageable memory works too, only slower; the first time it has to do, a warning is logged.

    Parameters
    ----------
    budget
        Bytes that may be pinned at once.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.pinned_bytes = 0
        self.pageable_bytes = 0
        self._warned = False

    @property
    def pinned_share(self) -> float | None:
        """Share of the memory in use that is pinned; None while there is none in use."""
        total = self.pinned_bytes + self.pageable_bytes
        return self.pinned_bytes / total if total else None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory on the host, counted until the tensor is gone."""
        nbytes = math.prod(shape) * dtype.itemsize
        tensor = None
        if self.pinned_bytes + nbytes > self.budget:
            self._warn(f"{nbytes} bytes more would exceed pinned_bytes={self.budget}")
        else:
            tensor = pinned(shape, dtype)
            if tensor is None:
                self._warn(f"the system refuses to pin {nbytes} bytes")
        kind = "pageable_bytes" if tensor is None else "pinned_bytes"
        if tensor is None:
            with torch.inference_mode(False):
                tensor = torch.empty(shape, dtype=dtype)
        self._count(kind, nbytes)
        weakref.finalize(tensor, self._count, kind, -nbytes)
        return tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> HostMemory:
        """The same one: copies of a cache share its budget."""
        return self

    def _count(self, kind: str, nbytes: int) -> None:
        setattr(self, kind, getattr(self, kind) + nbytes)

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("part of the home is in pageable memory, which moves slower: %s", reason)


def pinnable_bytes() -> int:
    """Half of the machine's memory: pinned memory cannot be swapped out, which others feel."""
    if not hasattr(os, "sysconf"):  # Windows
        return 4 * 2**30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Uninitialised pinned memory; None where the system refuses it.

    PyTorch keeps the memory of a dropped tensor until the copies that were queued from or to it
    are over.
    """
    try:
        # What `torch.inference_mode` allocates may not be written to outside of it.
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError:  # a limit on locked memory, or no device
        return None
