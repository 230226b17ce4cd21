"""Watches what torch allocates, for tests of peak memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _ExtraFields_Allocation
from torch.profiler import ProfilerActivity, profile
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


def allocated(call: Callable[[], object]) -> tuple[int, int]:
    """The most bytes that were allocated during a call and not yet freed, and those at its end.

    Only the caller's own thread is watched. What was allocated before the call counts neither as
    taken nor as given back: PyTorch's profiler tells of the end of such a block only if an earlier
    profile has seen an allocation at the same address, which is chance. Cycles are collected before
    and not during the call, so that they end at no random moment.
    """
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            call()
    finally:
        gc.enable()
    blocks: dict[int, int] = {}
    most = now = 0
    for address, nbytes in _changes(profiled):
        if nbytes > 0:
            blocks[address] = nbytes
            now += nbytes
        else:
            now -= blocks.pop(address, 0)
        most = max(most, now)
    return most, now


def _changes(profiled: profile) -> list[tuple[int, int]]:
    """Address and bytes of all allocations, negative when freed, in the order of time."""
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    pending = list(profiled.profiler.kineto_results.experimental_event_tree())
    found = []
    while pending:
        event = pending.pop()
        pending += event.children
        fields = event.extra_fields
        if isinstance(fields, _ExtraFields_Allocation):
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return [(address, nbytes) for _, address, nbytes in sorted(found, key=lambda change: change[0])]
