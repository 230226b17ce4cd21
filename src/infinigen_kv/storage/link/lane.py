"""A lane: what all stores of a cache share on the way to one CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from infinigen_kv.errors import InputError
from infinigen_kv.storage.link.staging import StagingRing
from infinigen_kv.storage.link.streams import CudaSideStreams, SideStreams

Gather = Literal["auto", "host", "device"]
GATHERS: tuple[Gather, ...] = get_args(Gather)
GatherRows = Callable[[Tensor, Tensor, Tensor], None]
"""``(source, index, target)``; see `triton_gather.gather_rows`."""


class Lane:
    """A device's side streams and staging, shared by all stores of a cache that are read there.

    Parameters
    ----------
    streams
        Of the device.
    gather
        Who gathers selected entries from pinned memory; ``auto`` measures at the first read.
    kernel
        Gathers rows on the device; None where there is none, which leaves it to the host.
    """

    def __init__(
        self, streams: SideStreams, gather: Gather = "auto", kernel: GatherRows | None = None
    ) -> None:
        self.streams = streams
        self.staging = StagingRing()
        self.kernel = kernel
        self.gather: Gather = "host" if kernel is None else gather

    @classmethod
    def on(cls, device: torch.device, gather: Gather) -> Lane:
        """For a CUDA device; raises `InputError` if ``gather`` asks for a missing kernel."""
        kernel = None if gather == "host" else _kernel()
        if kernel is None and gather == "device":
            raise InputError(
                "gather='device' needs triton, which is not installed: pip install triton, or "
                "choose gather='host'"
            )
        return cls(CudaSideStreams(device), gather, kernel)

    def close(self) -> None:
        """Drop the staging memory; may be called twice."""
        self.staging.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Lane:
        """The same one: copies of a cache share the device."""
        return self


def needs_lane(device: torch.device) -> bool:
    """Whether a device is apart from the host and has streams."""
    return device.type == "cuda"


def _kernel() -> GatherRows | None:
    try:
        from infinigen_kv.storage.link.triton_gather import gather_rows
    except ImportError:
        return None
    return gather_rows
