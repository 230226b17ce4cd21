"""What one cache builds from its storage settings: link, file, and the layers' pools."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from infinigen_kv.errors import InputError
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv.storage.home_kinds.base import HomeUse, OpenHome, PoolHome, StoreHome
from infinigen_kv.storage.homes.capped import CappedHome
from infinigen_kv.storage.homes.codec import codec_by_name
from infinigen_kv.storage.homes.packed import PackedHome
from infinigen_kv.storage.homes.pinned import HostMemory
from infinigen_kv.storage.homes.store import Store
from infinigen_kv.storage.link import Link, LinkSpec, Pace
from infinigen_kv.storage.link.cuda import CudaStore
from infinigen_kv.storage.link.lane import Lane, needs_lane
from infinigen_kv.storage.pools.linked import LinkedPool
from infinigen_kv.storage.pools.local import LocalPool
from infinigen_kv.storage.pools.pool import Pool
from infinigen_kv.storage.pools.resident import ResidentSet


class Storage:
    """What the layers of one cache share: the link and, for a disk home, the file.

    Parameters
    ----------
    config
        Settings.
    rate
        Bytes per second for ``emulated:paper``; see `storage.link.paper_rate`.
    tokens
        Tokens per row that the cache is made for; 0 if unknown.
    layers
        Layers that keep their KV in a home apart from the device.
    resident_kind
        Who does the bookkeeping of resident sets (`kernels.base.Kernels.resident_set`).
    sinks
        First real tokens of each row that stay in a home with a capacity.
    budget
        Share of the cache that a home may keep in memory, for kinds that page.
    """

    def __init__(
        self,
        config: StorageConfig,
        *,
        rate: float | None,
        tokens: int,
        layers: int,
        resident_kind: type[ResidentSet] = ResidentSet,
        sinks: int = 0,
        budget: float = 1.0,
    ) -> None:
        self.config = config
        self._sinks = sinks
        self._resident_kind = resident_kind
        self._tokens = tokens
        self._layers = max(1, layers)
        self._whole: Storage | None = None  # kept alive by its rows
        self.link = Link(
            _pace(LinkSpec.parse(config.link), rate), queue_depth=config.kind.threads(config)
        )
        self._memory = HostMemory(config.pinned_budget)
        self._lanes: dict[torch.device, Lane] = {}
        try:
            self._home = config.kind.open(HomeUse(config, self.link, tokens, budget))
        except BaseException:
            self.link.close()
            raise
        # a cache that is dropped must leave no thread and no file
        self.close = weakref.finalize(self, _close, self._home, self.link, self._lanes)

    @property
    def direct_io(self) -> bool | None:
        """Whether the disk is read past the page cache; None without a disk home."""
        return self._home.direct_io

    @property
    def bytes_on_disk(self) -> int:
        """Bytes reserved in files."""
        return self._home.bytes_on_disk

    @property
    def disk_bytes_read(self) -> int:
        """Bytes asked of the disk so far, the unwanted parts of blocks included."""
        return self._home.disk_bytes_read

    @property
    def lanes(self) -> list[Lane]:
        """The ways to the CUDA devices that hold the cache's layers."""
        return list(self._lanes.values())

    @property
    def pinned_share(self) -> float | None:
        """Share of the home in RAM that is pinned; None where no CUDA device asked for it."""
        return self._memory.pinned_share

    def expect(self, tokens: int) -> None:
        """Make the pools that are yet to come for at least so many tokens per row."""
        self._tokens = max(self._tokens, tokens)

    def for_row(self, tokens: int, rows: int) -> Storage:
        """For a cache of one of ``rows`` rows, of ``tokens`` tokens, over the same link and file.

        What is closed with the cache is the row's alone; whoever made this storage closes it.
        """
        row = copy.copy(self)
        row._tokens = tokens
        row._layers = self._layers * rows  # a resident set in bytes is for all rows together
        row._whole = self
        row.close = cast(Any, _nothing)
        return row

    def holds(self, tokens: int) -> bool:
        """Whether a home has room for so many tokens per row, so that none is evicted."""
        limit = self.config.limit(max(self._tokens, tokens))
        return limit is None or tokens <= limit

    def local_pool(self, keys: Tensor, values: Tensor) -> Pool:
        """A pool on the device, for layers that are kept there whole."""
        return LocalPool(keys, values, self._tokens)

    def pool(self, keys: Tensor, values: Tensor) -> Pool:
        """An empty pool for a layer with keys and values like these, ``(B, H_kv, *, D)``."""
        if self.config.is_local_on(keys.device):
            return self.local_pool(keys, values)
        if isinstance(self._home, PoolHome):
            return self._home.pool(keys, values, self._tokens)
        codec = codec_by_name(self.config.codec)
        tokens = max(self._tokens, keys.shape[2])
        limit = self.config.limit(tokens)
        if limit is None:
            home = PackedHome(keys, values, codec, partial(self._store, keys.device), tokens)
        else:
            home = CappedHome(keys, values, codec, partial(self._store, keys.device), limit)
        return LinkedPool(
            home,
            self.link,
            resident=self._resident(keys, values, tokens),
            eviction=None if limit is None else self.config.evict,
            sinks=self._sinks,
            resident_kind=self._resident_kind,
        )

    def _store(
        self, device: torch.device, rows: int, heads: int, entry_bytes: int, capacity: int
    ) -> Store:
        """A store for a layer whose keys and values are on ``device``."""
        assert isinstance(self._home, StoreHome)
        lane = self._lane(device)
        memory = None if lane is None else self._memory
        store = self._home.store(rows, heads, entry_bytes, capacity, memory)
        return store if lane is None else CudaStore(store, lane)

    def _lane(self, device: torch.device) -> Lane | None:
        """The way to a CUDA device, one for all its layers; others move entries one by one."""
        if not needs_lane(device):
            return None
        if device not in self._lanes:
            self._lanes[device] = Lane.on(device, self.config.gather)
        return self._lanes[device]

    def _resident(self, keys: Tensor, values: Tensor, tokens: int) -> int:
        entry = (keys.shape[3] + values.shape[3]) * keys.element_size()
        all_heads = self._layers * keys.shape[0] * keys.shape[1] * entry
        return self.config.resident_entries(keys.device, tokens, all_heads)


def _pace(spec: LinkSpec, rate: float | None) -> Pace | None:
    if not spec.is_emulated:
        return None
    used = spec.rate if spec.rate is not None else rate
    if used is None:
        raise InputError(
            "link='emulated:paper' needs the speed of the model: measure it with "
            "infinigen_kv.session.paper_link.paper_link_rate and pass new_cache(link_rate=...)"
        )
    return Pace(used, spec.latency)


def _close(home: OpenHome, link: Link, lanes: dict[torch.device, Lane]) -> None:
    try:
        home.close()
    finally:
        link.close()
        for lane in lanes.values():
            lane.close()


def _nothing() -> None:
    """Nothing is a row's alone but its pools, which its cache closes."""
