"""Bytes that one layer of one cache holds while it decodes.

Homes and policies plan their own. Where a class of the engine allocates them it is asked itself,
with tensors on PyTorch's ``meta`` device, which have shapes but no memory: so its rules of growth
and rounding are in one place.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from infinigen_kv.memory.geometry import LayerGeometry
from infinigen_kv.memory.request import PlanRequest
from infinigen_kv.policies.entry import CachePlan, PolicyBytes, PolicyShape
from infinigen_kv.policies.settings import PolicySettings
from infinigen_kv.storage.home_kinds.base import HomeShape
from infinigen_kv.storage.homes.buffer import TokenBuffer
from infinigen_kv.storage.homes.codec import Codec, EntryShape, codec_by_name
from infinigen_kv.storage.pools.linked import RING
from infinigen_kv.storage.pools.local import LocalPool
from infinigen_kv.storage.pools.resident import ResidentSet

META = torch.device("meta")
INDEX = torch.long.itemsize

Role = Literal["window", "whole", "apart"]
"""``whole`` keeps all KV on the device, ``apart`` in a home that a link reads."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one layer of one cache.

    Parameters
    ----------
    home
        In the home, where that is apart from the device (`Pool.home_bytes`).
    whole
        KV on the device, where all of it stays there, or what the home itself keeps there.
    resident, side
        The resident set; scales, tail and slot look-ups of a packed home.
    partial_keys, state
        Of the policy; the state of one that does not rehearse.
    window
        Of a sliding layer.
    rehearsal
        Prompt statistics, projections, the correction of the query projection, and tokens that wait
        for the next fit.
    host
        Beside the home in host memory: slot maps, the unfinished groups of a disk home.
    """

    home: int = 0
    whole: int = 0
    resident: int = 0
    side: int = 0
    partial_keys: int = 0
    state: int = 0
    window: int = 0
    rehearsal: int = 0
    host: int = 0

    @property
    def device_kv(self) -> int:
        """What `InfiniGenCache.device_bytes` counts."""
        return self.whole + self.resident + self.side + self.partial_keys + self.state

    def __add__(self, other: LayerBytes) -> LayerBytes:
        """Of two layers."""
        names = [each.name for each in fields(self)]
        return LayerBytes(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True)
class LayerPlanner:
    """Plans the layers of one cache; ``linked`` of them keep their KV apart from the device."""

    request: PlanRequest
    cache: CachePlan
    linked: int

    def layer(self, layer: LayerGeometry, role: Role, *, selects: bool) -> LayerBytes:
        """Bytes of a layer; ``selects`` unless it is attended to in full."""
        if role == "window":
            return LayerBytes(window=self._window(layer))
        chosen = self._selecting(layer) if selects else LayerBytes()
        if role == "whole":
            keys = self._like(layer)
            pool = LocalPool(keys, keys, self.request.context)
            return chosen + LayerBytes(whole=pool.device_bytes)
        return chosen + self._apart(layer)

    def entry_bytes(self, layer: LayerGeometry, *, packed: bool) -> int:
        """One entry on the device, or as the codec packs it."""
        if packed:
            return self._codec.entry_bytes(self._shape(layer))
        return 2 * layer.head_dim * self.request.geometry.dtype.itemsize

    @property
    def slots(self) -> int:
        """Tokens per row that a home apart from the device has room for."""
        limit = self.cache.storage.limit(self.request.context)
        return self.request.context if limit is None else limit

    @property
    def resident_entries(self) -> int:
        """Fetched entries per row and head that stay on the device."""
        layers = [each for each in self.request.geometry.layers if not each.is_sliding]
        like = layers[0]
        entries = self.linked * self.request.rows * like.num_kv_heads
        all_heads = max(1, entries) * self.entry_bytes(like, packed=False)
        context, device = self.request.context, self.request.device
        return min(self.cache.storage.resident_entries(device, context, all_heads), self.slots)

    @property
    def _codec(self) -> Codec:
        return codec_by_name(self.cache.storage.codec)

    def _shape(self, layer: LayerGeometry) -> EntryShape:
        return EntryShape(layer.head_dim, layer.head_dim, self.request.geometry.dtype)

    def _like(self, layer: LayerGeometry, tokens: int = 1) -> Tensor:
        """Keys of so many tokens, ``(B, H_kv, tokens, D)``."""
        shape = self.request.rows, layer.num_kv_heads, tokens, layer.head_dim
        return torch.empty(shape, dtype=self.request.geometry.dtype, device=META)

    def _buffer(
        self, layer: LayerGeometry, width: int, dtype: torch.dtype, tokens: int
    ) -> TokenBuffer:
        rows, heads = self.request.rows, layer.num_kv_heads
        return TokenBuffer(rows, heads, width, dtype=dtype, device=META, capacity=tokens)

    def _window(self, layer: LayerGeometry) -> int:
        """Transformers' `DynamicSlidingWindowLayer`, after the first decode step."""
        assert self.request.geometry.window is not None
        tokens = min(self.request.context, self.request.geometry.window - 1)
        return 2 * self._like(layer, tokens).nbytes

    def _apart(self, layer: LayerGeometry) -> LayerBytes:
        """`Storage.pool`: the home's own, or a `LinkedPool` of stores and a resident set."""
        storage = self.cache.storage
        held = storage.kind.planned(
            HomeShape(
                rows=self.request.rows,
                heads=layer.num_kv_heads,
                entry_bytes=self.entry_bytes(layer, packed=True),
                plain_bytes=self.entry_bytes(layer, packed=False),
                slots=self.slots,
                context=self.request.context,
                budget=self.request.budget,
            )
        )
        planned = LayerBytes(home=held.home, whole=held.device, host=held.host)
        if not storage.kind.has_stores:
            return planned
        slot_maps = 0
        if storage.capacity is not None:  # `SlotMap`: position and rank of every slot
            slot_maps = self.request.rows * 2 * INDEX * self.slots
            if self.slots >= self.request.prompt_tokens:  # and the ranks at the prompt's end
                slot_maps += self.request.rows * INDEX * self.request.prompt_tokens
        resident = self._resident(layer)
        return planned + LayerBytes(resident=resident, side=self._side(layer), host=slot_maps)

    def _resident(self, layer: LayerGeometry) -> int:
        budget = self.resident_entries
        if not budget:
            return 0
        keys = self._like(layer)
        kept = ResidentSet(keys, keys, budget=budget, ring=RING)
        kept.reserve(self.slots)
        return kept.nbytes

    def _side(self, layer: LayerGeometry) -> int:
        """`PackedHome.side_bytes`."""
        group, held, nbytes = self._codec.group, self.slots, 0
        if self.cache.storage.capacity is not None:  # `CappedHome`: where each slot's scales are
            nbytes += self.request.rows * (self.slots + 1) * INDEX
            # groups of overwritten tokens are used again once there are twice as many as slots
            stored = min(self.request.prompt_tokens, self.slots) + self.request.new_tokens
            held = min(stored, 2 * self.slots)
        if group > 1:
            dtype = self.request.geometry.dtype
            scales = self._buffer(layer, 2 * layer.head_dim, dtype, self.slots // group)
            scales.reserve(held // group)
            nbytes += scales.nbytes + 2 * self._like(layer, group).nbytes
        return nbytes

    def _selecting(self, layer: LayerGeometry) -> LayerBytes:
        held = self.policy_bytes(layer)
        return LayerBytes(
            partial_keys=held.partial_keys, state=held.state, rehearsal=held.rehearsal
        )

    def policy_bytes(self, layer: LayerGeometry) -> PolicyBytes:
        """What the layer's policy says that it will hold."""
        request, geometry = self.request, self.request.geometry
        assert self.cache.selecting is not None
        return self.cache.selecting.planned(
            PolicyShape(
                rows=request.rows,
                heads=layer.num_heads,
                kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                hidden_size=geometry.hidden_size,
                dtype=geometry.dtype,
                context=request.context,
                prompt_tokens=request.prompt_tokens,
                chunk=request.chunk,
                slots=self.slots,
                rank=request.rank,
                copied_query=layer.copied_query,
                shares_memory=request.unified,
                config=self.cache.config,
                settings=PolicySettings(budget=request.budget),
            )
        )
