"""How the caches of one kind are made: a policy and its settings, resolved for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.cache_utils import DynamicSlidingWindowLayer

from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.cache.layer import OffloadedLayer
from infinigen_kv.policies.base import Policy
from infinigen_kv.policies.entry import CachePlan, PolicyParts, Scoring
from infinigen_kv.policies.full import FullPolicy
from infinigen_kv.policies.layer_roles import resident_layers, selecting_layers
from infinigen_kv.policies.query_predictor import QueryPredictor
from infinigen_kv.policies.rehearsal_layer import RehearsalLayer
from infinigen_kv.policies.settings import PolicySettings
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv.storage.storage import Storage

if TYPE_CHECKING:
    from infinigen_kv.cache.contract import Owner
    from infinigen_kv.calibration.artefact import Calibration
    from infinigen_kv.kernels.base import Kernels
    from infinigen_kv.models.adapters.base import Adapter
    from infinigen_kv.models.adapters.layer_spec import LayerSpec


class CacheBlueprint:
    """Makes caches that differ in their contents only. They share kernels and rehearsal weights.

    Parameters
    ----------
    adapter
        Of the model.
    calibration
        None where the plan does not rehearse.
    plan, settings
        What the layers do.
    kernels
        Who computes decode steps; one thread at a time may use the caches.
    """

    def __init__(
        self,
        adapter: Adapter,
        calibration: Calibration | None,
        plan: CachePlan,
        settings: PolicySettings,
        kernels: Kernels,
    ) -> None:
        self._adapter = adapter
        self._calibration = calibration
        self._plan = plan
        self._settings = settings
        self._kernels = kernels
        self._local: set[int] = set()
        self._selecting = selecting_layers(adapter.layers, plan)
        if plan.rehearses:
            assert calibration is not None
            self._local = resident_layers(
                adapter.layers,
                plan.storage,
                self._selecting,
                adapter.model.device,
                calibration.report,
            )
        self._rehearsals: dict[int, RehearsalLayer] = {}

    @property
    def storage_config(self) -> StorageConfig:
        """Where the KV lives and how it moves."""
        return self._plan.storage

    def storage(self, tokens: int, rate: float | None) -> Storage:
        """What the layers of one cache share; ``tokens`` per row, 0 if unknown."""
        config, sinks = self._plan.storage, self._plan.config.sink_tokens
        apart = [spec for spec in self._adapter.layers if not spec.is_sliding]
        layers = len(apart) - len(self._local)
        return Storage(
            config,
            rate=rate,
            tokens=tokens,
            layers=layers,
            resident_kind=self._kernels.resident_set,
            sinks=sinks,
            budget=self._settings.budget,
        )

    def cache(self, storage: Storage, owner: Owner) -> InfiniGenCache:
        """An empty cache."""
        layers: list[OffloadedLayer | DynamicSlidingWindowLayer] = []
        sources: dict[int, list[int]] = {}
        for spec in self._adapter.layers:
            if spec.is_sliding:
                layers.append(DynamicSlidingWindowLayer(self._adapter.config.sliding_window))
                continue
            pool = storage.local_pool if spec.index in self._local else storage.pool
            layers.append(OffloadedLayer(spec, self._policy(spec), pool, self._kernels))
            if spec.index > 0:
                sources.setdefault(spec.index - 1, []).append(spec.index)
        return InfiniGenCache(layers, sources, self._plan.config, owner=owner, storage=storage)

    def _policy(self, spec: LayerSpec) -> Policy:
        if spec.index not in self._selecting - self._local:
            return FullPolicy()
        assert self._plan.selecting is not None
        policy = self._plan.selecting.make(
            PolicyParts(
                scoring=Scoring(spec.scaling, spec.softcap),
                config=self._plan.config,
                settings=self._settings,
                kernels=self._kernels,
                rehearsal=self._rehearsal(spec) if self._plan.rehearses else None,
            )
        )
        if spec.index == 0:  # nobody goes before it, so it is chosen for at the layer itself
            policy.selects_at_layer = True
        return policy

    def _rehearsal(self, spec: LayerSpec) -> RehearsalLayer:
        if spec.index not in self._rehearsals:
            assert self._calibration is not None
            self._plan.config.partial_dim(spec.head_dim)  # an error if there are too many
            fitted = self._calibration.layers[spec.index]
            paper = self._plan.config.rehearsal == "paper"
            correction = None if paper else fitted
            self._rehearsals[spec.index] = RehearsalLayer(
                predict_query=QueryPredictor(self._adapter, spec.index, correction, self._kernels),
                skew=fitted.skew if paper else None,
                scaling=spec.scaling,
                softcap=spec.softcap,
                alpha=self._plan.config.alpha_of(spec.index),
            )
        return self._rehearsals[spec.index]
