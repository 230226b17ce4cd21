"""One forward over rows of different lengths, each with a cache of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from infinigen_kv.attention.dense import decode_attention
from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.cache.contract import EngineCache
from infinigen_kv.cache.layer import OffloadedLayer
from infinigen_kv.errors import CacheStateError, UnsupportedModelError
from infinigen_kv.models.adapters.base import Adapter
from infinigen_kv.policies.step import Step


class RaggedCache(EngineCache):
    """The caches of several rows as one cache of a batch, for one token more in each row.

    The model's own layers run once over all rows; what depends on a row's length runs row by row,
    in the row's own cache. An object serves one forward, inside `one_token`.

    Parameters
    ----------
    caches
        Of one row each, made alike and not empty.
    width
        Rows of the forward, n; those beyond the caches' are padding, whose attention is 0.
    """

    def __init__(self, caches: Sequence[InfiniGenCache], width: int) -> None:
        first = caches[0]
        self.owner = first.owner
        self._caches = caches
        self._width = width
        self._sources = first.sources
        self._open = False
        lengths = [cache.get_seq_length() for cache in caches]
        padding = width - len(lengths)
        # on the host, so that the rows' steps need not wait for a device to read them
        self.position_ids = torch.tensor([*lengths, *[0] * padding])[:, None]  # (n, 1)
        self._step = Step(
            start=max(lengths),
            queries=1,
            rows=width,
            visible=None,
            position_ids=self.position_ids,
            selecting=True,
            config=first.config,
        )
        super().__init__(layers=[self._layer(index) for index in range(len(first.layers))])

    @contextmanager
    def one_token(self) -> Iterator[None]:
        """Around the forward: afterwards every row has its token, or, where that fails, none has.

        A row that cannot go back says so when it is used again; see `InfiniGenCache`.
        """
        windows = [
            _Window(layer, layer.keys, layer.values, layer.cumulative_length)
            for cache in self._caches
            for layer in cache.layers
            if isinstance(layer, DynamicSlidingWindowLayer)
        ]
        try:
            for row, cache in enumerate(self._caches):
                cache.begin_forward(
                    queries=1,
                    rows=1,
                    attention_mask=None,
                    position_ids=self.position_ids[row : row + 1],
                )
            self._open = True
            yield
        except BaseException:
            for window in windows:
                window.restore()
            self._end(finished=False)
            raise
        self._end(finished=True)

    def begin_forward(
        self, *, queries: int, rows: int, attention_mask: Tensor | None, position_ids: Tensor
    ) -> None:
        """Checks that this is the forward that the rows wait for."""
        if not self._open or queries != 1 or rows != self._width or attention_mask is not None:
            raise CacheStateError(
                "the rows of a batch take one token each, without a mask, and only through "
                "InfiniGenBatch.step()"
            )

    def attention_input(self, index: int, hidden: Tensor) -> RaggedLayer:
        """As `InfiniGenCache.attention_input`, for ``hidden`` ``(n, 1, M)``."""
        for follower in self._sources.get(index, ()):
            self._rows_of(follower).rehearse(hidden, self._step)
        if index == len(self.layers) - 1:
            for cache in self._caches:
                cache.prefetch_unheralded()
        return self._rows_of(index)

    def end_forward(self, *, finished: bool) -> None:
        """Nothing: the step is over when its logits are there."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest row."""
        return self._step.start

    # With these Transformers makes no mask: one query in a row sees all that the row holds.

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def _layer(self, index: int) -> RaggedLayer:
        layers = [cache.layers[index] for cache in self._caches]
        return SlidingRows(layers) if layers[0].is_sliding else OffloadedRows(layers)

    def _rows_of(self, index: int) -> RaggedLayer:
        layer = self.layers[index]
        assert isinstance(layer, RaggedLayer)
        return layer

    def _end(self, finished: bool) -> None:
        self._open = False
        with ExitStack() as ending:  # goes on with the others where one fails
            for cache in self._caches:
                ending.callback(cache.end_forward, finished=finished)


class RaggedLayer(CacheLayerMixin):
    """One layer of several caches of one row each."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self._layers = layers
        self.is_initialized = True

    def rehearse(self, hidden: Tensor, step: Step) -> None:
        """Choose this layer's entries from the previous layer's input ``(n, 1, M)``.

        ``step`` is that of all rows.
        """
        raise AssertionError("only layers with a home are rehearsed")

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        *,
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        """Attention of one query per row, ``query`` ``(n, H, 1, D)``: ``(n, 1, H, D_v)``."""
        shape = query.shape[0], 1, query.shape[1], values.shape[3]
        output = query.new_zeros(shape)  # rows of padding stay so
        for number, layer in enumerate(self._layers):
            row = slice(number, number + 1)
            output[row] = self._attend_row(
                layer, query[row], keys[row], values[row], scaling=scaling, softcap=softcap
            )
        return output

    @abstractmethod
    def _attend_row(
        self,
        layer: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        """One row's attention, its new token included: ``(1, 1, H, D_v)``."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new tokens alone; `attend` stores them and reads the others."""
        return key_states, value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the rows have been read."""

    def get_seq_length(self) -> int:
        return max(layer.get_seq_length() for layer in self._layers)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class OffloadedRows(RaggedLayer):
    """Rows whose KV has a home."""

    _layers: Sequence[OffloadedLayer]

    def rehearse(self, hidden: Tensor, step: Step) -> None:
        query = None
        for row, layer in enumerate(self._layers):
            if not layer.selects:
                layer.rehearse(hidden[row : row + 1])
                continue
            if query is None:  # the rows' policies share their weights
                query = layer.policy.predict(hidden, step)
            layer.rehearse_query(None if query is None else query[row : row + 1])

    def _attend_row(
        self,
        layer: OffloadedLayer,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        keys, values = layer.update(keys, values)
        return layer.attend(query, keys, values, None, scaling=scaling, softcap=softcap)


class SlidingRows(RaggedLayer):
    """Rows that keep a window, in Transformers' own layers."""

    _layers: Sequence[DynamicSlidingWindowLayer]

    def _attend_row(
        self,
        layer: DynamicSlidingWindowLayer,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        window_keys, window_values = layer.update(keys, values)  # no more than the window
        return decode_attention(query, window_keys, window_values, scaling=scaling, softcap=softcap)


class _Window(NamedTuple):
    """What a sliding layer held; its `update` makes new tensors and leaves these alone."""

    layer: DynamicSlidingWindowLayer
    keys: Tensor | None
    values: Tensor | None
    length: int

    def restore(self) -> None:
        self.layer.keys, self.layer.values = self.keys, self.values
        self.layer.cumulative_length = self.length


def check_rotary(adapter: Adapter, tokens: int) -> None:
    """Raise `UnsupportedModelError` if rows of up to ``tokens`` tokens would not be independent."""
    limit = adapter.steady_positions
    if limit is not None and tokens > limit:
        raise UnsupportedModelError(
            f"the rotary frequencies of this model change beyond {limit} tokens, by the longest "
            f"row of a forward: use new_batch(tokens={limit}) or less, or a cache for each row"
        )
