"""Settings of where a cache's KV lives and how it moves."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import torch

from infinigen_kv.errors import InputError
from infinigen_kv.storage.home_kinds.base import HomeKind
from infinigen_kv.storage.home_kinds.registry import HOMES
from infinigen_kv.storage.homes.codec import CODECS
from infinigen_kv.storage.homes.disk.file import DEPTH
from infinigen_kv.storage.homes.pinned import pinnable_bytes
from infinigen_kv.storage.homes.slots import EVICTIONS, SMALLEST_CAPACITY, Eviction
from infinigen_kv.storage.link import LinkSpec
from infinigen_kv.storage.link.lane import GATHERS, Gather

HOME_OPTIONS = ("home_dir", "queue_depth", "pinned_bytes", "gather")  # not of every kind of home
HARD_TO_PREDICT = 0.5  # share of a query's power that the prediction misses


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Home, link, codec, capacity and resident set.

    Parameters
    ----------
    home
        ``ram``, the host's memory, which is the device's own where the model runs on a CPU;
        ``disk``; ``device``, where nothing has to move; or another one that is registered
        (`storage.home_kinds`).
    home_dir
        Folder of a disk home's file; None for the temporary folder.
    link
        ``none`` (as fast as the machine), ``emulated:<GB/s>[,<latency us>]`` or ``emulated:paper``.
    codec
        ``none``, ``int8`` or ``int4``: how entries are packed at home.
    capacity
        Limit of the home in tokens per row (an int), or as a share of the tokens that the cache is
        made for (a float in (0, 1]); None for no limit.
    evict
        ``counter``, ``lru`` or ``fifo``: who makes room at the limit.
    resident
        Resident set: a float in [0, 1] is a share of the tokens that the cache is made for, an int
        is bytes for all layers, of which no more are used than there are entries. None means 0.2
        where entries cross an emulated link or come from disk, else 0.
    resident_layers
        Layers kept on the device whole and attended to in full: ``auto`` for those that are not
        rehearsed and those that calibration found hard to predict, or indices.
    queue_depth
        Reads in flight for a disk home.
    pinned_bytes
        Where the model runs on a CUDA device: bytes of a cache's home in RAM that may be pinned,
        beyond which it is pageable and slower; None for half of the machine's memory.
    gather
        Who collects selected entries from pinned memory for a CUDA device: ``host``, ``device`` (a
        Triton kernel), or ``auto`` for the faster one at the first read.

    Raises
    ------
    InputError
        If a value is outside its range.
    """

    home: str = "ram"
    home_dir: Path | None = None
    link: str = "none"
    codec: str = "none"
    capacity: int | float | None = None
    evict: Eviction = "counter"
    resident: int | float | None = None
    resident_layers: Literal["auto"] | tuple[int, ...] = "auto"
    queue_depth: int = DEPTH
    pinned_bytes: int | None = None
    gather: Gather = "auto"

    def __post_init__(self) -> None:
        kind = self.kind  # an unknown one is an error
        _one_of("gather", self.gather, GATHERS)
        _one_of("codec", self.codec, CODECS)
        _one_of("evict", self.evict, EVICTIONS)
        LinkSpec.parse(self.link)
        _number("capacity", self.capacity, SMALLEST_CAPACITY, "(0, 1]", zero=False)
        _number("resident", self.resident, 0, "[0, 1]", zero=True)
        if type(self.queue_depth) is not int or self.queue_depth < 1:
            raise InputError(
                f"queue_depth={self.queue_depth!r} is not valid: it must be an integer >= 1"
            )
        if not isinstance(self.home_dir, (str, os.PathLike, NoneType)):
            raise InputError(
                f"home_dir={self.home_dir!r} is not valid: it must be the path of a directory, or "
                "None for the temporary one"
            )
        _layers("resident_layers", self.resident_layers)
        given: Any = self.resident_layers
        if isinstance(given, list):  # the caller's, who may change it
            object.__setattr__(self, "resident_layers", tuple(given))
        pinned = self.pinned_bytes
        if pinned is not None and (type(pinned) is not int or pinned < 0):
            raise InputError(
                f"pinned_bytes={pinned!r} is not valid: it must be an integer >= 0, or None for "
                "half of the machine's memory"
            )
        self._check_taken(kind)
        if kind.place == "device" and not self.is_local:
            raise InputError(
                "home='device' keeps all KV as it is, on the device: leave codec, capacity, link "
                "and resident out, or choose home='ram' or 'disk'"
            )

    def _check_taken(self, kind: HomeKind) -> None:
        """Raise `InputError` for an option that the home has no use for."""
        for field in fields(self):
            if field.name not in HOME_OPTIONS or field.name in kind.options:
                continue
            value = getattr(self, field.name)
            if value != field.default:
                takers = " or ".join(
                    repr(name) for name, other in HOMES.items() if field.name in other.options
                )
                raise InputError(
                    f"{field.name}={_plain(value)!r} is not valid with home={self.home!r}, which "
                    f"has no use for it: leave it out, or choose home={takers}"
                )

    @property
    def kind(self) -> HomeKind:
        """What ``home`` names."""
        return HOMES[self.home]

    @property
    def is_local(self) -> bool:
        """Whether nothing has to move where the model runs on a CPU."""
        plain = self.codec == "none" and self.capacity is None and not self.resident
        return plain and self.kind.is_host_memory and self.link == "none"

    def is_local_on(self, device: torch.device) -> bool:
        """Whether home and device are the same memory, so that nothing has to move."""
        return self.is_local and (self.kind.place == "device" or device.type == "cpu")

    def resident_budget_on(self, device: torch.device) -> int | float:
        """`resident`, resolved."""
        if self.resident is not None:
            return self.resident
        local = self.kind.is_host_memory and device.type == "cpu"
        moves = self.link != "none" or not local
        return 0.2 if moves else 0

    def limit(self, tokens: int) -> int | None:
        """`capacity` in tokens per row, for a cache made for ``tokens``; None for no limit."""
        if self.capacity is None or isinstance(self.capacity, int):
            return self.capacity
        return max(SMALLEST_CAPACITY, math.floor(self.capacity * tokens))

    def resident_entries(self, device: torch.device, tokens: int, all_heads: int) -> int:
        """`resident` in entries per row and head.

        ``all_heads`` are the bytes of one entry of every row, head and layer that has a home.
        """
        budget = self.resident_budget_on(device)
        return math.ceil(budget * tokens) if isinstance(budget, float) else budget // all_heads

    @property
    def pinned_budget(self) -> int:
        """`pinned_bytes`, resolved."""
        return pinnable_bytes() if self.pinned_bytes is None else self.pinned_bytes


def hard_layers(report: Any) -> set[int]:
    """Layers whose prediction misses more than half of the query's power, by a calibration."""
    return {int(layer) for layer, fit in report.items() if fit["unexplained"] > HARD_TO_PREDICT}


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{name}={value!r} is not valid: it must be one of {', '.join(allowed)}")


def _layers(name: str, value: object) -> None:
    if value == "auto":
        return
    if not isinstance(value, (tuple, list)) or not all(type(each) is int for each in value):
        raise InputError(
            f"{name}={value!r} is not valid: it must be 'auto' or a tuple of layer indices"
        )


def _number(name: str, value: object, least: int, shares: str, *, zero: bool) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fits = False
    elif isinstance(value, int):
        fits = value >= least
    else:
        fits = (0 <= value <= 1) if zero else (0 < value <= 1)
    if not fits:
        raise InputError(
            f"{name}={value!r} is not valid: it must be a share in {shares} (a float) or an "
            f"integer >= {least}"
        )


def _plain(value: object) -> object:
    return str(value) if isinstance(value, os.PathLike) else value
