"""Homes in memory: the host's, and the device's own."""

from __future__ import annotations

from typing import ClassVar

import torch

from infinigen_kv.storage.home_kinds.base import (
    HomeBytes,
    HomeKind,
    HomeShape,
    HomeUse,
    Place,
    StoreHome,
)
from infinigen_kv.storage.homes.buffer import TokenBuffer
from infinigen_kv.storage.homes.pinned import HostMemory
from infinigen_kv.storage.homes.store import RamStore, Store

META = torch.device("meta")


class RamHome(StoreHome):
    """Stores in host memory."""

    def store(
        self, rows: int, heads: int, entry_bytes: int, capacity: int, memory: HostMemory | None
    ) -> Store:
        return RamStore(rows, heads, entry_bytes, capacity, memory)


class RamKind(HomeKind):
    """The host's memory, which is the device's own where the model runs on a CPU."""

    name = "ram"
    summary = "host memory"
    options = frozenset({"pinned_bytes", "gather"})
    is_host_memory = True

    def open(self, use: HomeUse) -> StoreHome:
        return RamHome()

    def planned(self, shape: HomeShape) -> HomeBytes:
        buffer = TokenBuffer(
            shape.rows,
            shape.heads,
            shape.entry_bytes,
            dtype=torch.uint8,
            device=META,
            capacity=shape.slots,
        )
        return HomeBytes(buffer.nbytes)


class DeviceKind(RamKind):
    """The device's memory: nothing moves, so no store is ever asked for."""

    name = "device"
    summary = "the device's memory, where nothing has to move"
    options = frozenset()
    place: ClassVar[Place] = "device"
    is_advised = False
