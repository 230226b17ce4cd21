"""Watches what torch allocates, for tests of peak memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Largest:
    """The largest tensor made so far: its bytes, and the operator."""

    nbytes: int = 0
    operator: str = ""


class _Watch(TorchDispatchMode):
    """Sees every operator; views and what is written in place have their storage from before."""

    def __init__(self, found: Largest) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        before = set(_storages([*args, *(kwargs or {}).values()]))
        for made in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(made, Tensor) and not before & set(_storages([made])):
                nbytes = made.untyped_storage().nbytes()
                if nbytes > self.found.nbytes:
                    self.found.nbytes, self.found.operator = nbytes, str(func)
        return output


def _storages(values: Any) -> Iterator[int]:
    for value in values:
        if isinstance(value, Tensor):
            yield value.untyped_storage().data_ptr()
        elif isinstance(value, (tuple, list)):
            yield from _storages(value)


@contextmanager
def largest_made() -> Iterator[Largest]:
    """Afterwards ``largest`` is known of all tensors that were allocated inside."""
    found = Largest()
    with torch.no_grad(), _Watch(found):
        yield found
