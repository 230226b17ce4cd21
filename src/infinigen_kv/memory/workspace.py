"""Memory that a run needs for a while: what a forward computes with and what is under way.

Derived from the code that each formula names; activations are those of a Llama-like block, whose
largest moment is either its attention or the product inside its MLP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from infinigen_kv.attention.dense import QUERY_BLOCK, SCORES
from infinigen_kv.memory.geometry import LayerGeometry
from infinigen_kv.memory.layers import LayerPlanner
from infinigen_kv.rehearsal.projection import TOKEN_BLOCK
from infinigen_kv.storage.homes.packed import CHUNK
from infinigen_kv.storage.homes.pinned import pinned_size
from infinigen_kv.storage.link.staging import BUFFERS, staging_size

FLOAT = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class Workspace:
    """Transient memory of one cache.

    Parameters
    ----------
    planner
        Of the cache's layers.
    selecting, streamed
        Layers apart from the device that select, and those that are read whole at every step.
    local
        A layer on the device that selects, if there is one.
    """

    planner: LayerPlanner
    selecting: tuple[LayerGeometry, ...]
    streamed: tuple[LayerGeometry, ...]
    local: LayerGeometry | None

    # The prompt

    def prefill(self) -> int:
        """Device bytes of the largest forward of the prompt."""
        request = self.planner.request
        linked = self.selecting + self.streamed
        ahead = self._earlier(linked[0], packed=True) if len(linked) > 1 else 0
        attention = max(self._attention(layer) for layer in request.geometry.layers)
        return request.rows * (ahead + max(self._mlp(), attention)) + self._logits()

    def _activations(self, hidden: int, others: int) -> int:
        """Bytes per row of so many tensors of the hidden size, and other numbers, per token."""
        geometry, chunk = self.planner.request.geometry, self.planner.request.chunk
        numbers = hidden * geometry.hidden_size + others
        return chunk * (numbers * geometry.dtype.itemsize + self._rotary())

    def _rotary(self) -> int:
        """Cosines and sines of one token."""
        geometry = self.planner.request.geometry
        return 2 * geometry.layers[0].head_dim * geometry.dtype.itemsize

    def _mlp(self) -> int:
        """Embeddings, the block's input, its residual, the normed input; gate, up, product."""
        return self._activations(4, 3 * self.planner.request.geometry.mlp_size)

    def _attention(self, layer: LayerGeometry) -> int:
        """Embeddings, the block's input, the normed one; query, key, value and the output."""
        heads, kv_heads = layer.num_heads, layer.num_kv_heads
        tensors = self._activations(3, (2 * heads + 2 * kv_heads) * layer.head_dim)
        # `Moments.observe`: the queries twice, the keys three times, in float32, the values twice
        block = min(TOKEN_BLOCK, self.planner.request.chunk)
        statistics = block * (2 * heads + 5 * kv_heads) * layer.head_dim * FLOAT
        attending = max(statistics, self._scores(layer))
        earlier = self._earlier(layer, packed=True)
        if earlier == 0:
            return tensors + attending
        # `LinkedPool.extend`: what a home apart holds by now, packed and unpacked, is joined with
        # the new tokens and then dropped
        if self.planner.cache.storage.codec != "none":
            earlier += self._earlier(layer, packed=False)
        joined = self._entries(layer, self.planner.request.prompt_tokens)
        return tensors + joined + max(earlier, attending)

    def _scores(self, layer: LayerGeometry) -> int:
        """What `attention.dense.dense_attention` makes for one row beyond its inputs and output."""
        request, itemsize = self.planner.request, self.planner.request.geometry.dtype.itemsize
        tokens, width = request.prompt_tokens, layer.num_heads * layer.head_dim
        if layer.has_softcap:  # keys in float32; scores, their cap and mask, probabilities
            keys = layer.num_kv_heads * tokens * layer.head_dim * FLOAT
            return keys + 4 * FLOAT * SCORES // request.rows
        if request.chunk == tokens:
            return 0
        if request.unified:  # `_continued_attention`
            folded = width + 2 * layer.num_kv_heads * layer.head_dim
            joined = width * (2 * itemsize + 3 * FLOAT)  # both parts, also in float32, and the sum
            return request.chunk * (folded * itemsize + joined)
        mask_and_bias = 1 + itemsize
        return min(QUERY_BLOCK, request.chunk) * tokens * mask_and_bias // request.rows

    def _earlier(self, layer: LayerGeometry, *, packed: bool) -> int:
        """What the last chunk reads of the tokens before it from a home apart, for one row."""
        request = self.planner.request
        if layer not in self.selecting + self.streamed:
            return 0
        return self._entries(layer, request.prompt_tokens - request.chunk, packed=packed)

    def _entries(self, layer: LayerGeometry, tokens: int, *, packed: bool = False) -> int:
        """Bytes of one row's entries."""
        return layer.num_kv_heads * tokens * self.planner.entry_bytes(layer, packed=packed)

    def _logits(self) -> int:
        """Of the last position, and `generate`'s copy in float32."""
        request = self.planner.request
        return (
            request.rows * request.geometry.vocabulary * (request.geometry.dtype.itemsize + FLOAT)
        )

    # A decode step

    def decode(self) -> int:
        """Device bytes of what moves during one step."""
        moved = [
            self._whole(layer, transfers=min(2, len(self.streamed))) for layer in self.streamed
        ]
        moved += [self._selected(layer) for layer in self.selecting]
        if self.local is not None:
            moved.append(self._gathered(self.local))
        return max(moved, default=0) + self._step_scores() + self._logits()

    def _whole(self, layer: LayerGeometry, *, transfers: int) -> int:
        """`LinkedPool.extend`: packed entries, unpacked ones, and both joined with the new token.

        While one layer is attended to, the next one's transfer is under way.
        """
        planner = self.planner
        entries = planner.request.rows * layer.num_kv_heads * planner.slots
        packed = planner.entry_bytes(layer, packed=True)
        plain = planner.entry_bytes(layer, packed=False)
        unpacked = 0 if planner.cache.storage.codec == "none" else plain
        return entries * (transfers * packed + unpacked + plain)

    def _selected(self, layer: LayerGeometry) -> int:
        """`LinkedPool.collect`: this layer's entries and the next one's on their way."""
        return 2 * self._fetched_bytes(layer) + self._gathered(layer)

    def _gathered(self, layer: LayerGeometry) -> int:
        """The chosen entries gathered, and joined with the new token's."""
        entries = self.planner.request.rows * layer.num_kv_heads * self._fetched
        return 2 * entries * self.planner.entry_bytes(layer, packed=False)

    def _fetched_bytes(self, layer: LayerGeometry) -> int:
        entries = self.planner.request.rows * layer.num_kv_heads * self._fetched
        return entries * self.planner.entry_bytes(layer, packed=True)

    @property
    def _fetched(self) -> int:
        """Entries per row and head that a step may attend to."""
        config = self.planner.cache.config
        least = config.recent_tokens + config.sink_tokens
        return min(self.planner.slots, max(least, math.ceil(config.max_fetch * self.planner.slots)))

    def _step_scores(self) -> int:
        """`NativeKernels`: scores, margins and probabilities of one query per row over everything,
        and half as much to spare.
        """
        request = self.planner.request
        lines = max(2 * layer.num_heads + layer.num_kv_heads for layer in request.geometry.layers)
        return request.rows * lines * request.context * FLOAT * 3 // 2

    # Buffers on the host

    def staging(self, home_bytes: int) -> int:
        """Host bytes between home and device, for a cache with so many bytes at home."""
        apart = self.selecting + self.streamed
        if not apart:
            return 0
        storage, request = self.planner.cache.storage, self.planner.request
        if storage.kind.place != "host":
            return storage.kind.buffers(storage, home_bytes, request.rows * request.context)
        return 0 if request.unified else self._pinned_buffers(home_bytes)

    def _pinned_buffers(self, home_bytes: int) -> int:
        """`StagingRing`, appends that wait to be stored, and what rounding adds to the home."""
        request, apart = self.planner.request, self.selecting + self.streamed
        ring = BUFFERS * max(staging_size(self._fetched_bytes(layer)) for layer in apart)
        appended = sum(
            pinned_size(
                request.rows
                * layer.num_kv_heads
                * min(CHUNK, request.chunk)
                * self.planner.entry_bytes(layer, packed=True)
            )
            for layer in apart
        )
        each = home_bytes // len(apart)
        fitting = self.planner.cache.storage.pinned_budget // max(1, pinned_size(each))
        rounding = min(len(apart), fitting) * (pinned_size(each) - each)
        return ring + appended + rounding
