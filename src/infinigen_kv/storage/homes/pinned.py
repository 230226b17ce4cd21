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
        Bytes that may be pinned at once. Every piece counts with its `pinned_size`; dropped ones go
        back to PyTorch, which keeps them for the next cache.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.pinned_bytes = 0
        self.pageable_bytes = 0
        self._taken = 0
        self._warned = False

    @property
    def pinned_share(self) -> float | None:
        """Share of the memory in use that is pinned; None while there is none in use."""
        total = self.pinned_bytes + self.pageable_bytes
        return self.pinned_bytes / total if total else None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory on the host, counted until the tensor is gone."""
        nbytes = math.prod(shape) * dtype.itemsize
        taken = pinned_size(nbytes)
        tensor = None
        if self._taken + taken > self.budget:
            self._warn(f"{nbytes} bytes more would exceed pinned_bytes={self.budget}")
        else:
            tensor = pinned(shape, dtype)
            if tensor is None:
                self._warn(f"the system refuses to pin {nbytes} bytes")
        if tensor is None:
            with torch.inference_mode(False):
                tensor = torch.empty(shape, dtype=dtype)
            amounts = 0, nbytes, 0
        else:
            amounts = nbytes, 0, taken
        self._count(*amounts)
        weakref.finalize(tensor, self._count, *(-each for each in amounts))
        return tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> HostMemory:
        """The same one: copies of a cache share its budget."""
        return self

    def _count(self, pinned_bytes: int, pageable_bytes: int, taken: int) -> None:
        self.pinned_bytes += pinned_bytes
        self.pageable_bytes += pageable_bytes
        self._taken += taken

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("part of the home is in pageable memory, which moves slower: %s", reason)


def pinnable_bytes() -> int:
    """Half of the machine's memory: pinned memory cannot be swapped out, which others feel."""
    if not hasattr(os, "sysconf"):  # Windows
        return 4 * 2**30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def pinned_size(nbytes: int) -> int:
    """What PyTorch pins for ``nbytes``: the next power of two."""
    return 1 << max(0, nbytes - 1).bit_length()


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
