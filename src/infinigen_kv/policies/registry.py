"""Names of the policies, and what a cache with each of them uses of the session's settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import InputError
from infinigen_kv.storage import StorageConfig

POLICIES: dict[str, str] = {
    "infinigen": "rehearse with the session's settings, move what is selected and not resident",
    "infinigen-paper": "the paper's rehearsal, no resident set, no resident layers",
    "stream": "everything crosses the link each step, one layer ahead (FlexGen)",
    "ideal": "all KV on the device, full attention",
}


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Settings of a cache, and whether its layers select."""

    config: InfiniGenConfig
    storage: StorageConfig
    selects: bool


def check_policy(name: str) -> str:
    """The name, if there is such a policy."""
    if name not in POLICIES:
        raise InputError(f"policy={name!r} is not valid: it must be one of {', '.join(POLICIES)}")
    return name


def cache_plan(policy: str, config: InfiniGenConfig, storage: StorageConfig) -> CachePlan:
    """What a cache with this policy uses, given a session's settings."""
    if policy == "infinigen":
        return CachePlan(config, storage, selects=True)
    if policy == "infinigen-paper":
        paper = config
        if config.rehearsal != "paper":
            paper = InfiniGenConfig(
                rehearsal="paper",
                max_fetch=config.max_fetch,
                first_layer=config.first_layer,
                min_context=config.min_context,
            )
        return CachePlan(paper, replace(storage, resident=0, resident_layers=()), selects=True)
    if policy == "stream":
        return CachePlan(config, replace(storage, resident=0), selects=False)
    return CachePlan(config, StorageConfig(home="device"), selects=False)
