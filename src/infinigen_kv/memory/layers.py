"""Bytes that one layer of one cache holds while it decodes.

Where a class of the engine allocates them it is asked itself, with tensors on PyTorch's ``meta``
device, which have shapes but no memory: so its rules of growth and rounding are in one place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from infinigen_kv.memory.baselines import policy_state
from infinigen_kv.memory.geometry import LayerGeometry
from infinigen_kv.memory.request import PlanRequest
from infinigen_kv.policies.registry import CachePlan
from infinigen_kv.rehearsal.checkpoints import KEPT
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.recent import LEAST, MOST
from infinigen_kv.rehearsal.statistics import (
    TOKEN_BLOCK,
    Magnitudes,
    Moments,
    Projection,
    PromptStatistics,
)
from infinigen_kv.rehearsal.tail import ValueMap
from infinigen_kv.storage.homes.buffer import TokenBuffer
from infinigen_kv.storage.homes.codec import Codec, EntryShape, codec_by_name
from infinigen_kv.storage.homes.disk.layout import Layout
from infinigen_kv.storage.pools.linked import RING
from infinigen_kv.storage.pools.pool import LocalPool
from infinigen_kv.storage.pools.resident import ResidentSet
from infinigen_kv_lab.paging.mapped import PAGE
from infinigen_kv_lab.paging.pool import SMALLEST

META = torch.device("meta")
INDEX = torch.long.itemsize

Role = Literal["window", "whole", "apart", "paged"]
"""``whole`` keeps all KV on the device, ``apart`` in a home that a link reads, ``paged`` in a file
of which a share is in memory.
"""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one layer of one cache.

    Parameters
    ----------
    home
        In the home, where that is apart from the device (`Pool.home_bytes`).
    whole
        KV on the device, where all of it stays there.
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

    policy: str
    request: PlanRequest
    cache: CachePlan
    linked: int

    def layer(self, layer: LayerGeometry, role: Role, *, selects: bool) -> LayerBytes:
        """Bytes of a layer; ``selects`` unless it is attended to in full."""
        if role == "window":
            return LayerBytes(window=self._window(layer))
        chosen = LayerBytes()
        if selects:
            chosen = LayerBytes(state=policy_state(self.policy, layer, self.request))
            chosen += self._rehearsed(layer) if self.cache.rehearses else LayerBytes()
        if role == "whole":
            keys = self._like(layer)
            pool = LocalPool(keys, keys, self.request.context)
            return chosen + LayerBytes(whole=pool.device_bytes)
        return chosen + (self._paged(layer) if role == "paged" else self._apart(layer))

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
        return self.cache.storage.resident_entries(device, context, all_heads)

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
        """`Storage.pool`: a `LinkedPool` of a packed home and a resident set."""
        storage = self.cache.storage
        entry = self.entry_bytes(layer, packed=True)
        keys, budget = self._like(layer), self.resident_entries
        home = host = resident = 0
        if storage.home == "disk":  # `DiskStore`: extents, and a last group for each row in memory
            layout = Layout.of(layer.num_kv_heads * entry)
            home = self.request.rows * layout.extents(self.slots) * layout.extent_bytes
            host = self.request.rows * layout.group_bytes
        else:  # `RamStore`
            home = self._buffer(layer, entry, torch.uint8, self.slots).nbytes
        if budget:
            kept = ResidentSet(keys, keys, budget=budget, ring=RING)
            kept.reserve(self.slots)
            resident = kept.nbytes
        if storage.capacity is not None:  # `SlotMap`: position and rank of every slot
            host += self.request.rows * 2 * INDEX * self.slots
            if self.slots >= self.request.prompt_tokens:  # and the ranks at the prompt's end
                host += self.request.rows * INDEX * self.request.prompt_tokens
        return LayerBytes(home=home, resident=resident, side=self._side(layer), host=host)

    def _paged(self, layer: LayerGeometry) -> LayerBytes:
        """`PagingPool`: for each head a share in whole pages, and one page more."""
        heads = self.request.rows * layer.num_kv_heads
        line = max(self.request.context, SMALLEST) * self.entry_bytes(layer, packed=False)
        pages = math.ceil(self.request.budget * line / PAGE) + 1
        return LayerBytes(home=heads * line, whole=heads * pages * PAGE)

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

    def _rehearsed(self, layer: LayerGeometry) -> LayerBytes:
        config, dtype = self.cache.config, self.request.geometry.dtype
        keys = self._like(layer)
        corrected = layer.copied_query
        if config.rehearsal == "paper":
            skew = torch.empty(
                layer.num_kv_heads, layer.head_dim, layer.head_dim, dtype=torch.float32, device=META
            )
            # on a CPU the skew is the calibration's own
            sums: PromptStatistics = Magnitudes.start(keys, skew)
            statistics = _held(sums)
            statistics -= skew.nbytes if self.request.unified else 0
        else:
            sums = Moments.start(keys, keys if config.tail else None)
            statistics = _held(sums)
            # `QueryPredictor`: down and up
            hidden, query = self.request.geometry.hidden_size, layer.num_heads * layer.head_dim
            corrected += self.request.rank * (hidden + 1 + query)
        projection = self._projection(layer)
        statistics += _held(projection) + self._checkpoints * sums.query_sums.nbytes
        waiting = self._waiting(layer, self._recent)
        return LayerBytes(
            partial_keys=self._partial_keys(layer, projection),
            rehearsal=statistics + (corrected + waiting) * dtype.itemsize,
        )

    def waiting_more(self, layer: LayerGeometry) -> int:
        """Bytes of `RecentTokens` at the end of the prompt, beyond those that always wait."""
        more = min(self.request.chunk, MOST) - self._recent
        dtype = self.request.geometry.dtype
        return self._waiting(layer, max(0, more)) * dtype.itemsize if self.cache.rehearses else 0

    def _waiting(self, layer: LayerGeometry, tokens: int) -> int:
        """Numbers of so many `RecentTokens`: queries, keys and values."""
        width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
        return self.request.rows * tokens * width

    @property
    def _recent(self) -> int:
        """Tokens that wait to be summed while others are decoded."""
        prompt, new = self.request.prompt_tokens, self.request.new_tokens
        if not self.cache.config.refit_every:
            return min(prompt, LEAST)
        return min(MOST, new + (prompt if prompt < MOST else LEAST))

    @property
    def _checkpoints(self) -> int:
        """Lengths of the prompt at which `RunningStatistics` keeps the queries' sums."""
        forwards = math.ceil(self.request.prompt_tokens / self.request.chunk)
        blocks = math.ceil(max(1, self.request.chunk - MOST) / TOKEN_BLOCK)
        return min(KEPT, forwards * blocks)

    def _projection(self, layer: LayerGeometry) -> Projection:
        rows, heads, dim = self.request.rows, layer.num_kv_heads, layer.head_dim
        rank = self.cache.config.partial_dim(dim)
        matrix = torch.empty(rows, heads, dim, rank, dtype=torch.float32, device=META)
        if self.cache.config.rehearsal == "paper":
            return Projection(matrix, matrix, None)
        return Projection(matrix, torch.empty_like(matrix), torch.empty_like(matrix[..., :1].mT))

    def _partial_keys(self, layer: LayerGeometry, projection: Projection) -> int:
        """`InfiniGenPolicy`: made of the prompt, or once a row is long enough, then appended to."""
        prompt, least = self.request.prompt_tokens, self.cache.config.min_context
        if least > self.request.context:
            return 0
        first = prompt if prompt >= least else min(least, self.slots)
        partial = PartialKeys(self._like(layer, first), projection, empty=True)
        partial.extend(first)
        while partial.storage.shape[3] < min(self.request.context, self.slots):
            partial.extend(partial.storage.shape[3] + 1 - partial.length)  # one by one as a rule
        if not self.cache.config.tail:
            return partial.nbytes
        rows, heads, rank = self.request.rows, layer.num_kv_heads, projection.key.shape[3]
        slope = torch.empty(rows, heads, rank, layer.head_dim, dtype=torch.float32, device=META)
        return partial.nbytes + ValueMap(slope[:, :, :1], slope).nbytes


def _held(holder: object) -> int:
    """Bytes of a dataclass of tensors, and of such dataclasses; shared ones once."""
    found = [getattr(holder, each.name) for each in fields(holder)]  # type: ignore[arg-type]
    sizes = {
        id(each): each.nbytes if isinstance(each, Tensor) else _held(each)
        for each in found
        if each is not None
    }
    return sum(sizes.values())
