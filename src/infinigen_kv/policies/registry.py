"""Names of the policies, and what a cache with each of them uses of the session's settings."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import InputError
from infinigen_kv.kernels.base import Kernels
from infinigen_kv.policies.base import Policy
from infinigen_kv.policies.infinigen import InfiniGenPolicy
from infinigen_kv.policies.rehearsal_layer import RehearsalLayer
from infinigen_kv.policies.settings import PolicySettings
from infinigen_kv.storage.config import StorageConfig, hard_layers
from infinigen_kv_lab.baselines.h2o import H2OPolicy
from infinigen_kv_lab.baselines.oracle import OraclePolicy
from infinigen_kv_lab.baselines.quest import QuestPolicy
from infinigen_kv_lab.baselines.scissorhands import ScissorhandsPolicy
from infinigen_kv_lab.baselines.scoring import Scoring
from infinigen_kv_lab.baselines.streaming_llm import StreamingLLMPolicy


class Layer(Protocol):
    """What tells a layer's part in a cache, e.g. `models.adapters.LayerSpec`."""

    @property
    def index(self) -> int:
        """Number of the layer."""

    @property
    def is_sliding(self) -> bool:
        """Whether it attends within a window only."""


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """What the policy of one layer may be made of.

    ``rehearsal`` is there where the entry says that it rehearses.
    """

    scoring: Scoring
    config: InfiniGenConfig
    settings: PolicySettings
    kernels: Kernels
    rehearsal: RehearsalLayer | None = None

    def rehearsing(self) -> InfiniGenPolicy:
        """InfiniGen's own policy."""
        assert self.rehearsal is not None
        return InfiniGenPolicy(self.rehearsal, self.config, self.kernels)


PolicyMaker = Callable[[PolicyParts], Policy]


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Settings of a cache, and what its layers do.

    Parameters
    ----------
    config, storage
        Settings of the selection and of the storage.
    selects
        Whether layers select, by policies that ``make`` makes; otherwise all attend in full.
    rehearses
        Whether that needs a calibration.
    paged
        Whether the home is read page by page on demand (`infinigen_kv_lab.paging.pool`).
    """

    config: InfiniGenConfig
    storage: StorageConfig
    selects: bool
    make: PolicyMaker | None = None
    rehearses: bool = False
    paged: bool = False


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """One policy: what it does in a line, and the plan of a cache with it."""

    summary: str
    plan: Callable[[InfiniGenConfig, StorageConfig], CachePlan]


def _infinigen(config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
    return CachePlan(config, storage, True, PolicyParts.rehearsing, rehearses=True)


def _infinigen_paper(config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
    if config.rehearsal != "paper":
        config = InfiniGenConfig(
            rehearsal="paper",
            max_fetch=config.max_fetch,
            first_layer=config.first_layer,
            min_context=config.min_context,
        )
    return _infinigen(config, replace(storage, resident=0, resident_layers=()))


def _oracle(config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
    def make(parts: PolicyParts) -> Policy:
        return OraclePolicy(parts.rehearsing(), parts.scoring)

    return CachePlan(config, storage, True, make, rehearses=True)


def _ideal(config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
    return CachePlan(config, StorageConfig(home="device"), selects=False)


def _stream(config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
    return CachePlan(config, replace(storage, resident=0), selects=False)


def _stream_packed(codec: str) -> Callable[[InfiniGenConfig, StorageConfig], CachePlan]:
    def plan(config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
        home = "ram" if storage.home == "device" else storage.home
        packed = replace(storage, home=home, codec=codec, resident=0)
        return CachePlan(config, packed, selects=False)

    return plan


def _budgeted(
    make: PolicyMaker, *, paged: bool = False
) -> Callable[[InfiniGenConfig, StorageConfig], CachePlan]:
    def plan(config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
        own = replace(storage, capacity=None, resident=0, resident_layers=())
        own = _paged(own) if paged else own
        return CachePlan(config, own, True, make, paged=paged)

    return plan


def _paging(config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
    return CachePlan(config, _paged(storage), selects=False, paged=True)


def _paged(storage: StorageConfig) -> StorageConfig:
    return StorageConfig(
        home_dir=storage.home_dir, link=storage.link, resident=0, resident_layers=()
    )


def _h2o(parts: PolicyParts) -> Policy:
    return H2OPolicy(parts.scoring, parts.settings)


_ENTRIES: Mapping[str, PolicyEntry] = MappingProxyType(
    {
        "infinigen": PolicyEntry(
            "rehearse with the session's settings, move what is selected and not resident",
            _infinigen,
        ),
        "infinigen-paper": PolicyEntry(
            "the paper's rehearsal, no resident set, no resident layers", _infinigen_paper
        ),
        "stream": PolicyEntry(
            "everything crosses the link each step, one layer ahead (FlexGen)", _stream
        ),
        "stream-int8": PolicyEntry("the same, with a cache of 8 bits", _stream_packed("int8")),
        "stream-int4": PolicyEntry("the same, with a cache of 4 bits", _stream_packed("int4")),
        "h2o": PolicyEntry(
            "a fixed budget: half recent tokens, half those with the most attention so far",
            _budgeted(_h2o),
        ),
        "scissorhands": PolicyEntry(
            "a fixed budget: the tokens that most of the last queries found important",
            _budgeted(lambda parts: ScissorhandsPolicy(parts.scoring, parts.settings)),
        ),
        "streaming-llm": PolicyEntry(
            "a fixed budget: the first tokens and the newest ones",
            _budgeted(lambda parts: StreamingLLMPolicy(parts.settings)),
        ),
        "quest": PolicyEntry(
            "a fixed budget: pages of tokens, ranked by bounds of their keys; no prefetch",
            _budgeted(lambda parts: QuestPolicy(parts.scoring, parts.settings)),
        ),
        "paging": PolicyEntry(
            "full attention to a memory-mapped file that is read page by page on demand", _paging
        ),
        "paging-h2o": PolicyEntry("h2o over the same file", _budgeted(_h2o, paged=True)),
        "oracle": PolicyEntry(
            "as many tokens as infinigen, chosen by the true scores: a bound, not a system", _oracle
        ),
        "ideal": PolicyEntry("all KV on the device, full attention", _ideal),
    }
)

POLICIES: Mapping[str, str] = MappingProxyType(
    {name: entry.summary for name, entry in _ENTRIES.items()}
)
"""What each policy does, by name."""


def check_policy(name: str) -> str:
    """The name, if there is such a policy; `InputError` says which names are near."""
    if name in POLICIES:
        return name
    near = difflib.get_close_matches(str(name).lower(), POLICIES, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise InputError(f"policy={name!r} is not valid: {hint}it must be one of {', '.join(POLICIES)}")


def cache_plan(policy: str, config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
    """What a cache with this policy uses, given a session's settings.

    The policies with a fixed budget keep nothing resident and ignore a capacity, which is
    InfiniGen's own way to limit a home.
    """
    return _ENTRIES[check_policy(policy)].plan(config, storage)


def selecting_layers(layers: Iterable[Layer], plan: CachePlan) -> set[int]:
    """Layers that attend to a selection, but for those that are kept on the device whole.

    Policies that do not rehearse need no predecessor, so they select in the first layer too.
    """
    if not plan.selects:
        return set()
    if plan.rehearses:
        return speculated_layers(layers, plan.config)
    return {layer.index for layer in layers if not layer.is_sliding}


def speculated_layers(layers: Iterable[Layer], config: InfiniGenConfig) -> set[int]:
    """Layers that can be rehearsed."""
    return {
        layer.index
        for layer in layers
        if not layer.is_sliding and layer.index >= config.first_layer
    }


def resident_layers(
    layers: Iterable[Layer],
    storage: StorageConfig,
    speculated: set[int],
    device: torch.device,
    report: Mapping[str, Any],
) -> set[int]:
    """Layers with full attention that keep all their KV on the device.

    ``report`` is the calibration's, with how well each of the ``speculated`` layers is predicted.
    Raises `InputError` if the storage names a layer that has no full attention.
    """
    full = {layer.index for layer in layers if not layer.is_sliding}
    wanted = storage.resident_layers
    if wanted != "auto":
        unknown = set(wanted) - full
        if unknown:
            raise InputError(
                f"resident_layers={sorted(wanted)} is not valid: {min(unknown)} is not a layer "
                f"with full attention; those are {sorted(full)}"
            )
        return set(wanted)
    if storage.is_local_on(device):
        return set()
    return (full - speculated) | (hard_layers(report) & speculated)
