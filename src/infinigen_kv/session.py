"""Attach to a model: hooks on, hooks off, nothing left behind."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.masking_utils import sdpa_mask

from infinigen_kv.adapters import adapter_for
from infinigen_kv.adapters.base import Adapter, LayerSpec
from infinigen_kv.attention import dense_attention
from infinigen_kv.cache import InfiniGenCache
from infinigen_kv.calibration import Calibration
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import CacheStateError, InputError
from infinigen_kv.offloaded import OffloadedLayer
from infinigen_kv.policies import FullPolicy, InfiniGenPolicy
from infinigen_kv.policies.infinigen import RehearsalLayer
from infinigen_kv.policies.registry import cache_plan, check_policy
from infinigen_kv.predict import QueryPredictor
from infinigen_kv.storage import Storage, StorageConfig, hard_layers

ATTENTION = "infinigen_kv"
CACHE_NAMES = ("cache", "past_key_values", "layer_past")  # by release and family


class Session:
    """A model while it is attached; makes caches for it. Use through `attach`."""

    def __init__(
        self,
        model: PreTrainedModel,
        calibration: Calibration | None,
        config: InfiniGenConfig,
        storage: StorageConfig,
    ) -> None:
        self.model = model
        self.config = config
        self.storage = storage
        self.adapter: Adapter = adapter_for(model)
        self.closed = False
        self._caches: weakref.WeakSet[InfiniGenCache] = weakref.WeakSet()
        self._calibration = calibration

    def new_cache(
        self,
        *,
        tokens: int = 0,
        policy: str = "infinigen",
        storage: StorageConfig | None = None,
        link_rate: float | None = None,
    ) -> InfiniGenCache:
        """An empty cache for one batch.

        Parameters
        ----------
        tokens
            Tokens per row that the cache is made for: reserved at once, and what shares of the
            context refer to. 0 if unknown; pools then grow by halves.
        policy
            One of `policies.registry.POLICIES`.
        storage
            Home, link, codec, capacity, resident set; None for the session's.
        link_rate
            Bytes per second of a link ``emulated:paper``.
        """
        if self.closed:
            raise CacheStateError("the session is over: make caches inside `with attach(...)`")
        if tokens < 0:
            raise InputError(f"tokens={tokens} is not valid: it must be an integer >= 0")
        plan = cache_plan(check_policy(policy), self.config, storage or self.storage)
        if isinstance(plan.storage.capacity, float) and tokens == 0:
            raise InputError(
                f"capacity={plan.storage.capacity} is a share of the tokens that the cache is made "
                "for: say how many in new_cache(tokens=...), or give the capacity in tokens"
            )
        speculated = self._speculated(plan.config) if plan.selects else set()
        local = self._resident_layers(plan.storage, speculated) if plan.selects else set()
        apart = [spec for spec in self.adapter.layers if not spec.is_sliding]
        shared = Storage(
            plan.storage, rate=link_rate, tokens=tokens, layers=len(apart) - len(local)
        )
        layers: list[OffloadedLayer | DynamicSlidingWindowLayer] = []
        sources: dict[int, list[int]] = {}
        for spec in self.adapter.layers:
            if spec.is_sliding:
                layers.append(DynamicSlidingWindowLayer(self.model.config.sliding_window))
                continue
            selects = spec.index in speculated - local
            made = self._policy(spec, plan.config) if selects else FullPolicy()
            pool = shared.local_pool if spec.index in local else shared.pool
            layers.append(OffloadedLayer(spec, made, pool))
            if spec.index > 0:
                sources.setdefault(spec.index - 1, []).append(spec.index)
        cache = InfiniGenCache(layers, sources, plan.config, owner=self, storage=shared)
        self._caches.add(cache)
        return cache

    def check_length(self, tokens: int) -> None:
        """Raise `InputError` if the model has fewer positions than ``tokens``."""
        limit = self.adapter.max_positions
        if limit is not None and tokens > limit:
            raise InputError(
                f"{tokens} tokens (prompt and new ones) are more than the model's {limit} "
                "positions: shorten the prompt or generate fewer tokens"
            )

    def _speculated(self, config: InfiniGenConfig) -> set[int]:
        if self._calibration is None:
            raise InputError(
                "attach(model) without a calibration only makes caches with policy='ideal' or "
                "policy='stream'"
            )
        return {
            spec.index
            for spec in self.adapter.layers
            if not spec.is_sliding and spec.index >= config.first_layer
        }

    def _resident_layers(self, storage: StorageConfig, speculated: set[int]) -> set[int]:
        """Layers with full attention that keep all their KV on the device."""
        full = {spec.index for spec in self.adapter.layers if not spec.is_sliding}
        wanted = storage.resident_layers
        if wanted != "auto":
            unknown = set(wanted) - full
            if unknown:
                raise InputError(
                    f"resident_layers={sorted(wanted)} is not valid: {min(unknown)} is not a layer "
                    f"with full attention; those are {sorted(full)}"
                )
            return set(wanted)
        if storage.is_local_on(self.model.device):
            return set()
        assert self._calibration is not None
        return (full - speculated) | (hard_layers(self._calibration.report) & speculated)

    def _policy(self, spec: LayerSpec, config: InfiniGenConfig) -> InfiniGenPolicy:
        assert self._calibration is not None
        fitted = self._calibration.layers[spec.index]
        paper = config.rehearsal == "paper"
        rehearsal = RehearsalLayer(
            predict_query=QueryPredictor(self.adapter, spec.index, None if paper else fitted),
            skew=fitted.skew if paper else None,
            scaling=spec.scaling,
            softcap=spec.softcap,
        )
        return InfiniGenPolicy(rehearsal, config)

    # Hooks.

    def begin_forward(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Before the decoder runs: tell the cache what is coming."""
        kwargs = _by_name(decoder, args, kwargs)
        cache = _find_cache(kwargs)
        if cache is None:
            return
        if cache.owner is not self:
            raise CacheStateError(
                "this cache was made for another model or an earlier attach: make one with "
                "session.new_cache() of the session that is attached now"
            )
        shown = kwargs.get("inputs_embeds")
        shown = kwargs.get("input_ids") if shown is None else shown
        if shown is None or shown.shape[1] == 0:
            raise InputError("the prompt is empty: give at least one token")
        rows, queries = shown.shape[:2]
        start = cache.get_seq_length()
        if start == 0:  # later tokens are left to the model: finished work must not be lost
            self.check_length(queries)
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(start, start + queries, device=shown.device)[None]
        cache.begin_forward(
            queries=queries,
            rows=rows,
            attention_mask=kwargs.get("attention_mask"),
            position_ids=positions,
        )

    def attention_input(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before a layer's attention: rehearse its followers, hand it its own cache layer."""
        cache = _find_cache(kwargs)
        if cache is None:
            return None
        hidden = self.adapter.attention_input(args, kwargs)
        layer = cache.attention_input(index, hidden)
        return None if layer is None else (args, {**kwargs, "offloaded_layer": layer})

    @staticmethod
    def end_forward(decoder: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """After the decoder ran, or failed: then there is no output."""
        cache = _find_cache(_by_name(decoder, args, kwargs))
        if cache is not None:
            cache.end_forward(finished=output is not None)

    def close(self) -> None:
        """Refuse new caches, and end the threads and files of those there are."""
        self.closed = True
        with ExitStack() as undo:  # goes on with the others where one fails
            for cache in self._caches:
                undo.callback(cache.storage.close)


@contextmanager
def attach(
    model: PreTrainedModel,
    calibration: Calibration | None = None,
    config: InfiniGenConfig | None = None,
    storage: StorageConfig | None = None,
) -> Iterator[Session]:
    """Let ``model`` use InfiniGen caches inside a ``with`` block; afterwards it is as it was.

    Parameters
    ----------
    model
        A causal model of a supported family, loaded and on its device.
    calibration
        From `calibrate` or `Calibration.load`; None allows exact attention only.
    config
        Settings of the selection; None for the defaults.
    storage
        Where the KV lives and how it moves; None keeps it in memory, on the device.

    Yields
    ------
    Session
        Its ``new_cache()`` goes into ``model.generate(..., cache=cache)``.

    Raises
    ------
    UnsupportedModelError
        If the model's family has no adapter.
    CalibrationError
        If the calibration belongs to another model.
    """
    session = Session(model, calibration, config or InfiniGenConfig(), storage or StorageConfig())
    if calibration is not None:
        calibration.check_model(session.adapter)
    if model.config._attn_implementation == ATTENTION:
        raise CacheStateError("the model is attached already: leave that `with` block first")
    with ExitStack() as undo:
        undo.callback(session.close)
        _set_attention(model, undo)
        _add_hooks(session, undo)
        yield session


def infinigen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    offloaded_layer: OffloadedLayer | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """A Transformers attention function: the offloaded layer's if there is one, else plain."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if offloaded_layer is not None:
        output = offloaded_layer.attend(
            query, key, value, attention_mask, scaling=scale, softcap=softcap
        )
    else:
        output = dense_attention(
            query, key, value, scaling=scale, softcap=softcap, mask=attention_mask, dropout=dropout
        )
    return output, None


def _set_attention(model: PreTrainedModel, undo: ExitStack) -> None:
    """Route the model's attention here, and its masks to booleans."""
    AttentionInterface.register(ATTENTION, infinigen_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    before = model.config._attn_implementation
    undo.callback(model.set_attn_implementation, before)
    model.set_attn_implementation(ATTENTION)


def _add_hooks(session: Session, undo: ExitStack) -> None:
    decoder = session.adapter.decoder
    # each on its own line: one that cannot be added must not leave an earlier one behind
    before = decoder.register_forward_pre_hook(session.begin_forward, with_kwargs=True)
    undo.callback(before.remove)
    after = decoder.register_forward_hook(session.end_forward, with_kwargs=True, always_call=True)
    undo.callback(after.remove)
    for spec in session.adapter.layers:

        def hook(
            module: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            index: int = spec.index,
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            return session.attention_input(index, args, kwargs)

        undo.callback(spec.module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _by_name(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The decoder's arguments by name, those that were passed by position included."""
    if not args:
        return kwargs
    return {**inspect.signature(decoder.forward).bind_partial(*args).arguments, **kwargs}


def _find_cache(kwargs: dict[str, Any]) -> InfiniGenCache | None:
    for name in CACHE_NAMES:
        if isinstance(kwargs.get(name), InfiniGenCache):
            return kwargs[name]
    return None
