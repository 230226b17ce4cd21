"""Attach to a model: hooks on, hooks off, nothing left behind."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel

from infinigen_kv.batching.batch import InfiniGenBatch
from infinigen_kv.batching.ragged import check_rotary
from infinigen_kv.cache.blueprint import CacheBlueprint
from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.cache.contract import ProcessBound
from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.checks import check_integer
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import CacheStateError, InputError
from infinigen_kv.kernels.finding import KernelsName, find_kernels
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.models.adapters.base import Adapter
from infinigen_kv.policies.registry import POLICIES, cache_plan, check_policy
from infinigen_kv.policies.settings import BUDGET, PolicySettings
from infinigen_kv.session.attached_attention import is_attached
from infinigen_kv.session.given_cache import keep_given_caches
from infinigen_kv.session.hooks import add_hooks, set_attention
from infinigen_kv.storage.config import StorageConfig


class Session(ProcessBound):
    """A model while it is attached; makes caches for it. Use through `attach`."""

    def __init__(
        self,
        model: PreTrainedModel,
        calibration: Calibration | None,
        config: InfiniGenConfig,
        storage: StorageConfig,
        kernels: KernelsName = "auto",
    ) -> None:
        self.model = model
        self.kernels = kernels
        self.config = config
        self.storage = storage
        self.adapter: Adapter = adapter_for(model)
        self.closed = False
        self._holders: weakref.WeakSet[InfiniGenCache | InfiniGenBatch] = weakref.WeakSet()
        self._calibration = calibration

    def new_cache(
        self,
        *,
        tokens: int = 0,
        policy: str = "infinigen",
        storage: StorageConfig | None = None,
        link_rate: float | None = None,
        kernels: KernelsName | None = None,
        budget: float = BUDGET,
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
        kernels
            Who computes decode steps, see `attach`; None for the session's.
        budget
            Share of the cached tokens, in (0, 1], that the policies with a fixed budget attend to,
            and that those that page keep on the device.
        """
        self._check_open()
        if tokens < 0:
            raise InputError(f"tokens={tokens} is not valid: it must be an integer >= 0")
        blueprint = self._blueprint(policy, storage, kernels, budget)
        capacity = blueprint.storage_config.capacity
        if isinstance(capacity, float) and tokens == 0:
            raise InputError(
                f"capacity={capacity} is a share of the tokens that the cache is made for: say how "
                "many in new_cache(tokens=...), or give the capacity in tokens"
            )
        cache = blueprint.cache(blueprint.storage(tokens, link_rate), owner=self)
        self._holders.add(cache)
        return cache

    def new_batch(
        self,
        *,
        tokens: int,
        rows: int = 8,
        policy: str = "infinigen",
        storage: StorageConfig | None = None,
        link_rate: float | None = None,
        kernels: KernelsName | None = None,
        budget: float = BUDGET,
        fixed_width: bool = True,
    ) -> InfiniGenBatch:
        """An empty batch whose rows join and leave one by one; close it, or use it in a ``with``.

        Parameters
        ----------
        tokens
            Tokens that a row may hold, prompt included; at most the model's positions.
        rows
            Rows that may be in the batch at once.
        storage
            As for `new_cache`. All rows share one link and, on disk, one file. A ``resident`` or
            ``pinned_bytes`` in bytes is for all rows together; a ``capacity`` is each row's.
        policy, link_rate, kernels, budget
            As for `new_cache`.
        fixed_width
            Whether a row's logits are the same to the last bit however many others take part, see
            `InfiniGenBatch`. Without it, steps of few of many rows are faster.

        Raises
        ------
        InputError
            If a value is outside its range.
        UnsupportedModelError
            If one row's positions would change those of the others.
        """
        self._check_open()
        check_integer("rows", rows, 1)
        check_integer("tokens", tokens, 1)
        self.check_length(tokens)
        check_rotary(self.adapter, tokens)
        blueprint = self._blueprint(policy, storage, kernels, budget)
        shared = blueprint.storage(tokens, link_rate)
        batch = InfiniGenBatch(
            self, blueprint, shared, rows=rows, tokens=tokens, fixed_width=fixed_width
        )
        self._holders.add(batch)
        return batch

    def check_length(self, tokens: int) -> None:
        """Raise `InputError` if the model has fewer positions than ``tokens``."""
        limit = self.adapter.max_positions
        if limit is not None and tokens > limit:
            raise InputError(
                f"{tokens} tokens (prompt and new ones) are more than the model's {limit} "
                "positions: shorten the prompt or generate fewer tokens"
            )

    def _check_open(self) -> None:
        if self.closed:
            raise CacheStateError("the session is over: make caches inside `with attach(...)`")

    def _blueprint(
        self,
        policy: str,
        storage: StorageConfig | None,
        kernels: KernelsName | None,
        budget: float,
    ) -> CacheBlueprint:
        plan = cache_plan(check_policy(policy), self.config, storage or self.storage)
        settings = PolicySettings(budget=budget)
        if plan.rehearses and self._calibration is None:
            others = [
                name
                for name in POLICIES
                if not cache_plan(name, self.config, self.storage).rehearses
            ]
            raise InputError(
                f"policy={policy!r} needs a calibration: make one and use attach(model, "
                f"calibration); without a calibration there are {', '.join(others)}"
            )
        computing = find_kernels(kernels or self.kernels, self.model.device, self.model.dtype)
        return CacheBlueprint(self.adapter, self._calibration, plan, settings, computing)

    def close(self) -> None:
        """Refuse new caches, and end the threads and files of those there are."""
        self.closed = True
        with ExitStack() as undo:  # goes on with the others where one fails
            for holder in self._holders:
                undo.callback(holder.storage.close)


def default_storage(
    calibration: Calibration | None,
    config: InfiniGenConfig,
    device: torch.device,
    wanted: StorageConfig | None = None,
) -> StorageConfig:
    """``wanted``, with what was tuned for the model; that goes with the calibrated rehearsal."""
    if calibration is None or config.rehearsal != "calibrated":
        return wanted or StorageConfig()
    return calibration.storage(wanted, device)


@contextmanager
def attach(
    model: PreTrainedModel,
    calibration: Calibration | None = None,
    config: InfiniGenConfig | None = None,
    storage: StorageConfig | None = None,
    *,
    kernels: KernelsName = "auto",
) -> Iterator[Session]:
    """Let ``model`` use InfiniGen caches inside a ``with`` block; afterwards it is as it was.

    Parameters
    ----------
    model
        A causal model of a supported family, loaded and on its device.
    calibration
        From `calibrate` or `Calibration.load`; None allows exact attention only.
    config
        Settings of the selection; None for those that were tuned for the model (``tune``), or
        the defaults. To change some of the tuned ones: ``calibration.config(max_fetch=0.3)``.
    storage
        Where the KV lives and how it moves; None keeps it in memory, with the resident set and
        layers that were tuned for the model. To have these with a storage of your own:
        ``calibration.storage(StorageConfig(home="disk"))``.
    kernels
        Who computes decode steps: ``native`` (compiled, on a CPU), ``torch``, or ``auto`` for the
        native ones where they can be had.

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
    InputError
        If alpha is given by layer, for another number of layers.
    """
    find_kernels(kernels, model.device, model.dtype)  # what cannot be had is said now
    if config is None:
        config = InfiniGenConfig() if calibration is None else calibration.config()
    if storage is None:
        storage = default_storage(calibration, config, model.device)
    session = Session(model, calibration, config, storage, kernels)
    if calibration is not None:
        calibration.check_model(session.adapter)
    layers = len(session.adapter.layers)
    if isinstance(config.alpha, tuple) and len(config.alpha) != layers:
        raise InputError(
            f"alpha has {len(config.alpha)} values, and the model {layers} layers: give one number "
            "for all layers, or one for each layer"
        )
    if is_attached(model, session.adapter.decoder):
        raise CacheStateError("the model is attached already: leave that `with` block first")
    with ExitStack() as undo:
        undo.callback(session.close)
        keep_given_caches(model, session.adapter.rereads_after, undo)
        set_attention(session, undo)
        add_hooks(session, undo)
        yield session
