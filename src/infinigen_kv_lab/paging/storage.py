"""What a cache with demand paging builds in place of `storage.storage.Storage`'s pools."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

from torch import Tensor

from infinigen_kv.storage.config import StorageConfig
from infinigen_kv.storage.pools.pool import Pool
from infinigen_kv.storage.storage import Storage
from infinigen_kv_lab.paging.pool import PagingPool


class PagedStorage(Storage):
    """A `Storage` whose pools are `PagingPool`: each layer with a file of its own.

    Parameters
    ----------
    config, rate, tokens
        As for `Storage`; of the config only the link and the folder matter.
    budget
        Share of the cache that may be in memory.
    """

    def __init__(
        self, config: StorageConfig, *, rate: float | None, tokens: int, budget: float
    ) -> None:
        super().__init__(config, rate=rate, tokens=tokens, layers=1)
        self._budget = budget
        self._pools: weakref.WeakSet[PagingPool] = weakref.WeakSet()
        # typed by its first value, which closes other things
        self.close = cast(Any, weakref.finalize(self, _close, self._pools, self.close))

    @property
    def bytes_on_disk(self) -> int:
        return sum(pool.home_bytes for pool in self._pools)

    def pool(self, keys: Tensor, values: Tensor) -> Pool:
        """An empty pool for a layer with keys and values like these, ``(B, H_kv, *, D)``."""
        made = PagingPool(
            keys,
            values,
            self.link,
            directory=self.config.home_dir,
            budget=self._budget,
            tokens=self._tokens,
        )
        self._pools.add(made)
        return made


def _close(pools: Iterable[PagingPool], rest: Callable[[], object]) -> None:
    try:
        for pool in pools:
            pool.close()
    finally:
        rest()
