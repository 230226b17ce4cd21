"""Systems over a memory-mapped file that is read page by page on demand."""

from __future__ import annotations

from collections.abc import Callable

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.policies.entry import CachePlan, PolicyEntry, Selecting
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv_lab.baselines.h2o import h2o_bytes, h2o_policy


def _paged(selecting: Selecting | None) -> Callable[[InfiniGenConfig, StorageConfig], CachePlan]:
    def plan(config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
        own = StorageConfig(
            home="paged",
            home_dir=storage.home_dir,
            link=storage.link,
            resident=0,
            resident_layers=(),
        )
        return CachePlan(config, own, selecting)

    return plan


PAGING = PolicyEntry(
    "paging",
    "full attention to a memory-mapped file that is read page by page on demand",
    _paged(None),
    takes_budget=True,
)
PAGING_H2O = PolicyEntry(
    "paging-h2o",
    "h2o over the same file",
    _paged(Selecting(h2o_policy, h2o_bytes)),
    takes_budget=True,
)
