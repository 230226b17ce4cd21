"""The memory that a run will need, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Literal, NamedTuple, get_args

from infinigen_kv.memory.geometry import LayerGeometry
from infinigen_kv.memory.layers import LayerBytes, LayerPlanner, Role
from infinigen_kv.memory.request import PlanRequest
from infinigen_kv.memory.workspace import Workspace
from infinigen_kv.policies.registry import cache_plan, resident_layers, selecting_layers
from infinigen_kv.storage.link import LinkSpec

Place = Literal["device", "host", "disk"]
PLACES: tuple[Place, ...] = ("device", "host", "disk")
Phase = Literal["always", "prefill", "decode", "probe"]

CALIBRATION_ITEM = 4  # bytes: `LayerCalibration` is float32


@dataclass(frozen=True, slots=True)
class Part:
    """One line of a plan: what needs memory, and how many bytes of it where.

    What only one phase needs (reading the prompt, a decode step, measuring the speed of the model
    for ``emulated:paper`` beforehand) is never held together with what another one needs.
    """

    name: str
    device: int = 0
    host: int = 0
    disk: int = 0
    phase: Phase = "always"

    def at(self, place: Place) -> int:
        """Bytes at that place."""
        nbytes: int = getattr(self, place)
        return nbytes


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """One cache of a plan, layer by layer."""

    policy: str
    layers: tuple[LayerBytes, ...]

    @property
    def home_bytes(self) -> int:
        """As `InfiniGenCache.home_bytes`."""
        return sum(layer.home for layer in self.layers)

    @property
    def device_bytes(self) -> int:
        """As `InfiniGenCache.device_bytes` once the prompt is read and decoding has begun."""
        return sum(layer.device_kv for layer in self.layers)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a run needs.

    Parameters
    ----------
    parts
        Lines; those of all caches together.
    caches
        The KV in detail, one for each policy.
    unified
        Device and host are the same memory, so their sum counts.
    """

    parts: tuple[Part, ...]
    caches: tuple[CacheBytes, ...]
    unified: bool

    def total(self, place: Place) -> int:
        """Bytes at a place at the worst moment; ``unified`` ones are all on the ``device``."""
        if not self.unified or place == "disk":
            return self._worst((place,))
        return self._worst(("device", "host")) if place == "device" else 0

    def __getitem__(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    def _worst(self, places: tuple[Place, ...]) -> int:
        sums = dict.fromkeys(get_args(Phase), 0)
        for part in self.parts:
            sums[part.phase] += sum(part.at(place) for place in places)
        return sums.pop("always") + max(sums.values())


class _Planned(NamedTuple):
    """A cache, and what it needs beside its layers."""

    cache: CacheBytes
    home: Place
    staging: int
    prefill: int
    decode: int

    def home_at(self, place: Place) -> int:
        """Bytes of the home, if it is there."""
        return self.cache.home_bytes if self.home == place else 0


def plan_memory(request: PlanRequest) -> MemoryPlan:
    """Bytes of everything that a run allocates, by what needs them and where they live."""
    planned = [_plan_cache(request, policy) for policy in request.policies]
    layers = [layer for each in planned for layer in each.cache.layers]
    kv = reduce(add, layers, LayerBytes())
    probe = _probe_bytes(request) if LinkSpec.parse(request.storage.link).is_paper else 0
    home = {place: sum(each.home_at(place) for each in planned) for place in PLACES}
    held = (
        Part("home", host=home["host"], disk=home["disk"]),
        Part("KV kept on the device", device=kv.whole + kv.window),
        Part("partial keys", device=kv.partial_keys),
        Part("resident set", device=kv.resident),
        Part("scales, tails, slots", device=kv.side, host=kv.host),
        Part("rehearsal", device=kv.rehearsal + kv.state),
        Part("staging buffers", host=sum(each.staging for each in planned)),
    )
    # the measurement comes before the caches, or with the first of them
    probe -= sum(part.device + (part.host if request.unified else 0) for part in held)
    parts = (
        Part("weights", device=request.geometry.weight_bytes),
        Part("calibration", host=_calibration_bytes(request)),
        *held,
        Part("prompt", device=max(each.prefill for each in planned), phase="prefill"),
        Part("decode step", device=sum(each.decode for each in planned), phase="decode"),
        Part("measuring the link", device=max(0, probe), phase="probe"),
    )
    return MemoryPlan(parts, tuple(each.cache for each in planned), request.unified)


def _probe_bytes(request: PlanRequest) -> int:
    """`session.paper_link.paper_link_rate`: everything on the device, and a copy of it."""
    ideal = _plan_cache(request, "ideal")
    return 2 * ideal.cache.device_bytes + ideal.prefill


def _plan_cache(request: PlanRequest, policy: str) -> _Planned:
    cache = cache_plan(policy, request.config, request.storage)
    layers, device = request.geometry.layers, request.device
    speculated = selecting_layers(layers, cache)
    kept: set[int] = set()
    if cache.rehearses:
        kept = resident_layers(layers, cache.storage, speculated, device, request.report)
    apart: Role = "whole" if cache.storage.is_local_on(device) else "apart"
    apart = "paged" if cache.paged else apart
    roles = {layer.index: _role(layer, kept, apart) for layer in layers}
    linked = [layer for layer in layers if roles[layer.index] in ("apart", "paged")]
    planner = LayerPlanner(policy, request, cache, len(linked))
    selecting = speculated - kept
    found = _by_kind(planner, layers, roles, selecting)
    here = [each for each in layers if roles[each.index] == "whole" and each.index in selecting]
    workspace = Workspace(
        planner,
        selecting=tuple(layer for layer in linked if layer.index in selecting),
        streamed=tuple(layer for layer in linked if layer.index not in selecting),
        local=here[0] if here else None,
    )
    bytes_of = CacheBytes(policy, found)
    return _Planned(
        cache=bytes_of,
        home="disk" if cache.paged or cache.storage.home == "disk" else "host",
        staging=workspace.staging(bytes_of.home_bytes),
        prefill=workspace.prefill()
        + sum(planner.waiting_more(each) for each in layers if each.index in speculated),
        decode=workspace.decode(),
    )


def _role(layer: LayerGeometry, kept: set[int], others: Role) -> Role:
    if layer.is_sliding:
        return "window"
    return "whole" if layer.index in kept else others


def _by_kind(
    planner: LayerPlanner,
    layers: Iterable[LayerGeometry],
    roles: dict[int, Role],
    selecting: set[int],
) -> tuple[LayerBytes, ...]:
    """Every layer's bytes; layers of one kind are planned once."""
    known: dict[tuple[LayerGeometry, Role, bool], LayerBytes] = {}
    found = []
    for layer in layers:
        kind = replace(layer, index=0), roles[layer.index], layer.index in selecting
        if kind not in known:
            known[kind] = planner.layer(kind[0], kind[1], selects=kind[2])
        found.append(known[kind])
    return tuple(found)


def _calibration_bytes(request: PlanRequest) -> int:
    """`Calibration.layers`, float32 on the host, which every selecting cache shares."""
    caches = [cache_plan(each, request.config, request.storage) for each in request.policies]
    if not any(cache.rehearses for cache in caches):
        return 0
    numbers = 0
    for layer in request.geometry.layers[1:]:
        if not layer.is_sliding:
            query = layer.num_heads * layer.head_dim
            numbers += request.rank * (request.geometry.hidden_size + 1 + query)
            numbers += layer.num_kv_heads * layer.head_dim**2
    return numbers * CALIBRATION_ITEM
