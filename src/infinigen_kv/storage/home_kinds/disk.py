"""The disk home: a file for each cache, read past the page cache by threads of the link."""

from __future__ import annotations

import torch

from infinigen_kv.storage.home_kinds.base import (
    HomeBytes,
    HomeKind,
    HomeSettings,
    HomeShape,
    HomeUse,
    StoreHome,
)
from infinigen_kv.storage.homes.disk.file import WRITE_BEHIND, DiskFile
from infinigen_kv.storage.homes.disk.layout import EXTENT, Layout
from infinigen_kv.storage.homes.disk.scratch import existing
from infinigen_kv.storage.homes.disk.store import STAGE, DiskStore
from infinigen_kv.storage.homes.pinned import HostMemory
from infinigen_kv.storage.homes.store import Store

INDEX = torch.long.itemsize


class DiskHome(StoreHome):
    """One file for all layers of a cache."""

    def __init__(self, file: DiskFile) -> None:
        self._file = file

    @property
    def bytes_on_disk(self) -> int:
        return self._file.nbytes

    @property
    def disk_bytes_read(self) -> int:
        return self._file.bytes_read

    @property
    def direct_io(self) -> bool | None:
        return self._file.direct

    def store(
        self, rows: int, heads: int, entry_bytes: int, capacity: int, memory: HostMemory | None
    ) -> Store:
        return DiskStore(self._file, rows, heads, entry_bytes, capacity)

    def close(self) -> None:
        self._file.close()


class DiskKind(HomeKind):
    """A file that is gone with the cache."""

    name = "disk"
    summary = "a file, which is removed at the end"
    options = frozenset({"home_dir", "queue_depth", "gather"})
    place = "disk"
    is_copyable = False

    def threads(self, settings: HomeSettings) -> int:
        return settings.queue_depth

    def check(self, settings: HomeSettings) -> None:
        existing(settings.home_dir)

    def open(self, use: HomeUse) -> StoreHome:
        return DiskHome(
            DiskFile(
                use.settings.home_dir,
                readers=use.link.readers,
                writers=use.link.writer,
                depth=use.settings.queue_depth,
            )
        )

    def planned(self, shape: HomeShape) -> HomeBytes:
        """`DiskStore`: extents, and a last group for each row in memory."""
        layout = Layout.of(shape.heads * shape.entry_bytes)
        return HomeBytes(
            home=shape.rows * layout.extents(shape.slots) * layout.extent_bytes,
            host=shape.rows * layout.group_bytes,
        )

    def buffers(self, settings: HomeSettings, home_bytes: int, tokens: int) -> int:
        """`WriteBehind`, what the readers hold, and `DiskStore._plan`'s maps of all tokens."""
        waiting = min(WRITE_BEHIND + STAGE, home_bytes)
        return waiting + settings.queue_depth * EXTENT + 2 * INDEX * tokens
