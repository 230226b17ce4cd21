"""Bytes of what decode steps take from a home, and of what a cache holds."""

from __future__ import annotations

import torch

from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.storage.homes.codec import EntryShape, codec_by_name
from infinigen_kv.storage.pools.local import LocalPool


def token_bytes(cache: InfiniGenCache, dtype: torch.dtype) -> dict[int, int]:
    """Bytes of one token at home, all KV heads together, for each layer that has a home.

    Layers that a cache keeps on the device whole have none.

    Parameters
    ----------
    cache
        With a prompt in it.
    dtype
        The model's.
    """
    config = cache.storage.config
    if config.home == "device":
        return {}
    codec, resident = codec_by_name(config.codec), cache.resident_layers
    found = {}
    for spec in (layer.spec for layer in cache.offloaded):
        if spec.index not in resident:
            entry = codec.entry_bytes(EntryShape(spec.head_dim, spec.head_dim, dtype))
            found[spec.index] = spec.num_kv_heads * entry
    return found


def held_bytes(cache: InfiniGenCache) -> tuple[int, int]:
    """Bytes reserved in the homes, and on the device beside them.

    The latter are resident layers and sets, scales of packed keys, and partial keys. Where home and
    device are one memory, the KV itself counts as the home's.
    """
    home, device = cache.home_bytes, cache.device_bytes
    if home == 0 and cache.storage.config.home != "device":
        pools = [layer.pool for layer in cache.offloaded]
        home = sum(pool.device_bytes for pool in pools if isinstance(pool, LocalPool))
        device -= home
    return home, device
