"""The paged home: each layer with a memory-mapped file of its own."""

from __future__ import annotations

import math
import weakref

from torch import Tensor

from infinigen_kv.storage.home_kinds.base import (
    HomeBytes,
    HomeKind,
    HomeShape,
    HomeUse,
    PoolHome,
)
from infinigen_kv.storage.pools.pool import Pool
from infinigen_kv_lab.paging.mapped import PAGE
from infinigen_kv_lab.paging.pool import SMALLEST, PagingPool


class PagedHome(PoolHome):
    """Makes a `PagingPool` for each layer."""

    def __init__(self, use: HomeUse) -> None:
        self._use = use
        self._pools: weakref.WeakSet[PagingPool] = weakref.WeakSet()

    @property
    def bytes_on_disk(self) -> int:
        return sum(pool.home_bytes for pool in self._pools)

    def pool(self, keys: Tensor, values: Tensor, tokens: int) -> Pool:
        pool = PagingPool(
            keys,
            values,
            self._use.link,
            directory=self._use.settings.home_dir,
            budget=self._use.budget,
            tokens=tokens,
        )
        self._pools.add(pool)
        return pool

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


class PagedKind(HomeKind):
    """What CUDA's managed memory does for a cache that is larger than the card."""

    name = "paged"
    summary = "memory-mapped files, read page by page on demand"
    options = frozenset({"home_dir"})
    place = "disk"
    is_copyable = False
    is_advised = False
    has_stores = False

    def open(self, use: HomeUse) -> PagedHome:
        return PagedHome(use)

    def planned(self, shape: HomeShape) -> HomeBytes:
        """`PagingPool`: for each head a share in whole pages, and one page more."""
        heads = shape.rows * shape.heads
        line = max(shape.context, SMALLEST) * shape.plain_bytes
        pages = math.ceil(shape.budget * line / PAGE) + 1
        return HomeBytes(home=heads * line, device=heads * pages * PAGE)
