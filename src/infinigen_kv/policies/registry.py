"""The policies by name: the engine's own here, others by the entry points of their packages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import InputError
from infinigen_kv.policies.base import Policy
from infinigen_kv.policies.entry import CachePlan, PolicyEntry, PolicyParts, Selecting
from infinigen_kv.policies.infinigen import InfiniGenPolicy
from infinigen_kv.policies.infinigen_plan import infinigen_bytes
from infinigen_kv.registry import Registry
from infinigen_kv.storage.config import StorageConfig

GROUP = "infinigen_kv.policies"
"""Entry points of packages with policies: each names a sequence of `PolicyEntry`."""


def rehearsing_policy(parts: PolicyParts) -> InfiniGenPolicy:
    """InfiniGen's own policy of one layer."""
    assert parts.rehearsal is not None
    return InfiniGenPolicy(parts.rehearsal, parts.config, parts.kernels)


def _infinigen(config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
    if config.index_bits is not None and storage.capacity is not None:
        raise InputError(
            f"index_bits={config.index_bits!r} is not valid with capacity={storage.capacity!r}, "
            "which overwrites single tokens of a group: leave one of them out"
        )
    make: Callable[[PolicyParts], Policy] = rehearsing_policy
    return CachePlan(config, storage, Selecting(make, infinigen_bytes, rehearses=True))


def _infinigen_paper(config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
    if config.rehearsal != "paper":
        config = InfiniGenConfig(
            rehearsal="paper",
            max_fetch=config.max_fetch,
            first_layer=config.first_layer,
            min_context=config.min_context,
        )
    return _infinigen(config, replace(storage, resident=0, resident_layers=()))


def _ideal(config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
    return CachePlan(config, StorageConfig(home="device"))


def _stream(config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
    return CachePlan(config, replace(storage, resident=0))


def _stream_packed(codec: str) -> Callable[[InfiniGenConfig, StorageConfig], CachePlan]:
    def plan(config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
        home = "ram" if storage.home == "device" else storage.home
        return CachePlan(config, replace(storage, home=home, codec=codec, resident=0))

    return plan


POLICIES: Registry[PolicyEntry] = Registry(
    "policy",
    GROUP,
    (
        PolicyEntry(
            "infinigen",
            "rehearse with the session's settings, move what is selected and not resident",
            _infinigen,
        ),
        PolicyEntry(
            "infinigen-paper",
            "the paper's rehearsal, no resident set, no resident layers",
            _infinigen_paper,
        ),
        PolicyEntry(
            "stream", "everything crosses the link each step, one layer ahead (FlexGen)", _stream
        ),
        PolicyEntry("stream-int8", "the same, with a cache of 8 bits", _stream_packed("int8")),
        PolicyEntry("stream-int4", "the same, with a cache of 4 bits", _stream_packed("int4")),
        PolicyEntry("ideal", "all KV on the device, full attention", _ideal),
    ),
)
"""Every policy; `Registry.register` adds one for this process."""


def check_policy(name: str) -> str:
    """The name, if there is such a policy; `InputError` says which names are near."""
    return POLICIES[name].name


def cache_plan(policy: str, config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
    """What a cache with this policy uses, given a session's settings.

    The policies with a fixed budget keep nothing resident and ignore a capacity, which is
    InfiniGen's own way to limit a home.
    """
    return POLICIES[policy].plan(config, storage)
