"""What a cache holds and has moved, summed over its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infinigen_kv.cache.contract import EngineCache
from infinigen_kv.cache.layer import OffloadedLayer
from infinigen_kv.policies.full import FullPolicy
from infinigen_kv.storage.pools.linked import LinkedPool
from infinigen_kv.storage.pools.local import LocalPool
from infinigen_kv.storage.pools.pool import Pool

if TYPE_CHECKING:
    from infinigen_kv.storage.storage import Storage


class CacheStatistics(EngineCache):
    """A cache whose layers with full attention are `OffloadedLayer`, seen from outside."""

    storage: Storage

    @property
    def offloaded(self) -> list[OffloadedLayer]:
        """The layers whose KV has a home."""
        return [layer for layer in self.layers if isinstance(layer, OffloadedLayer)]

    @property
    def home_bytes(self) -> int:
        """Bytes reserved for KV in the homes of all layers."""
        return sum(pool.home_bytes for pool in self._pools)

    @property
    def device_bytes(self) -> int:
        """Bytes of KV, resident sets and partial keys on the device."""
        kept = sum(pool.device_bytes for pool in self._pools)
        return kept + sum(layer.policy.nbytes for layer in self.offloaded)

    @property
    def speculated_layers(self) -> list[int]:
        """Layers whose entries are selected."""
        return [
            layer.spec.index for layer in self.offloaded if not isinstance(layer.policy, FullPolicy)
        ]

    @property
    def resident_layers(self) -> dict[int, int]:
        """Layers kept on the device whole, where others have a home apart, and their bytes."""
        pools = {layer.spec.index: layer.pool for layer in self.offloaded}
        kept = {
            index: pool.device_bytes for index, pool in pools.items() if isinstance(pool, LocalPool)
        }
        return kept if len(kept) < len(pools) else {}

    @property
    def resident_hit_rate(self) -> float:
        """Share of the entries that steps wanted and found on the device; NaN without any."""
        lookups = [pool.lookups for pool in self._pools if isinstance(pool, LinkedPool)]
        wanted = sum(each.wanted for each in lookups)
        return sum(each.hits for each in lookups) / wanted if wanted else float("nan")

    @property
    def moved_entries(self) -> dict[int, int]:
        """Entries of each selecting layer that steps wanted and did not find on the device."""
        return {
            layer.spec.index: layer.pool.lookups.wanted - layer.pool.lookups.hits
            for layer in self.offloaded
            if isinstance(layer.pool, LinkedPool)
        }

    def reset_statistics(self) -> None:
        """Count link traffic and resident hits anew."""
        self.storage.link.statistics.reset()
        for pool in self._pools:
            if isinstance(pool, LinkedPool):
                pool.lookups.reset()

    @property
    def _pools(self) -> list[Pool]:
        return [layer.pool for layer in self.offloaded if layer.pool is not None]
