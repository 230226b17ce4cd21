"""Where a cache's KV lives and how it moves: settings, and what one cache builds from them."""

from __future__ import annotations

import copy
import math
import os
import re
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, cast

import torch
from torch import Tensor

from infinigen_kv.errors import InputError
from infinigen_kv.kernels import Kernels
from infinigen_kv.link import Link, LinkSpec, Pace
from infinigen_kv.link.cuda import CudaStore
from infinigen_kv.link.lane import GATHERS, Gather, Lane, needs_lane
from infinigen_kv.pool.capped import CappedHome
from infinigen_kv.pool.codec import CODECS, codec_by_name
from infinigen_kv.pool.disk import DiskStore
from infinigen_kv.pool.disk_file import DEPTH, DiskFile
from infinigen_kv.pool.linked import LinkedPool
from infinigen_kv.pool.packed import PackedHome
from infinigen_kv.pool.pinned import HostMemory, pinnable_bytes
from infinigen_kv.pool.pool import LocalPool, Pool
from infinigen_kv.pool.slots import EVICTIONS, SMALLEST_CAPACITY, Eviction
from infinigen_kv.pool.store import RamStore, Store

HARD_TO_PREDICT = 0.5  # share of a query's power that the prediction misses
UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Home, link, codec, capacity and resident set.

    Parameters
    ----------
    home
        ``ram``, the host's memory, which is the device's own where the model runs on a CPU;
        ``disk``; or ``device``, where nothing has to move.
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
        is bytes for all layers. None means 0.2 where entries cross an emulated link or come from
        disk, else 0.
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

    home: Literal["ram", "disk", "device"] = "ram"
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
        _one_of("home", self.home, ("ram", "disk", "device"))
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
        pinned = self.pinned_bytes
        if pinned is not None and (type(pinned) is not int or pinned < 0):
            raise InputError(
                f"pinned_bytes={pinned!r} is not valid: it must be an integer >= 0, or None for "
                "half of the machine's memory"
            )
        if self.home == "device" and not self.is_local:
            raise InputError(
                "home='device' keeps all KV as it is, on the device: leave codec, capacity, link "
                "and resident out, or choose home='ram' or 'disk'"
            )

    @property
    def is_local(self) -> bool:
        """Whether nothing has to move where the model runs on a CPU."""
        plain = self.codec == "none" and self.capacity is None and not self.resident
        return plain and self.home != "disk" and self.link == "none"

    def is_local_on(self, device: torch.device) -> bool:
        """Whether home and device are the same memory, so that nothing has to move."""
        return self.is_local and (self.home == "device" or device.type == "cpu")

    def resident_budget_on(self, device: torch.device) -> int | float:
        """`resident`, resolved."""
        if self.resident is not None:
            return self.resident
        moves = self.home == "disk" or self.link != "none" or device.type != "cpu"
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


class Storage:
    """What the layers of one cache share: the link and, for a disk home, the file.

    Parameters
    ----------
    config
        Settings.
    rate
        Bytes per second for ``emulated:paper``; see `link.paper_rate`.
    tokens
        Tokens per row that the cache is made for; 0 if unknown.
    layers
        Layers that keep their KV in a home apart from the device.
    kernels
        Who does the bookkeeping of resident sets; None for PyTorch.
    sinks
        First real tokens of each row that stay in a home with a capacity.
    """

    def __init__(
        self,
        config: StorageConfig,
        *,
        rate: float | None,
        tokens: int,
        layers: int,
        kernels: Kernels | None = None,
        sinks: int = 0,
    ) -> None:
        self.config = config
        self._sinks = sinks
        self._kernels = kernels
        self._tokens = tokens
        self._layers = max(1, layers)
        self._whole: Storage | None = None  # kept alive by its rows
        self.link = Link(
            _pace(LinkSpec.parse(config.link), rate),
            queue_depth=config.queue_depth if config.home == "disk" else 0,
        )
        self._memory = HostMemory(config.pinned_budget)
        self._lanes: dict[torch.device, Lane] = {}
        self._file: DiskFile | None = None
        if config.home == "disk":
            try:
                self._file = DiskFile(
                    config.home_dir,
                    readers=self.link.readers,
                    writers=self.link.writer,
                    depth=config.queue_depth,
                )
            except BaseException:
                self.link.close()
                raise
        # a cache that is dropped must leave no thread and no file
        self.close = weakref.finalize(self, _close, self._file, self.link, self._lanes)

    @property
    def direct_io(self) -> bool | None:
        """Whether the disk is read past the page cache; None without a disk home."""
        return None if self._file is None else self._file.direct

    @property
    def bytes_on_disk(self) -> int:
        """Bytes reserved in the file."""
        return 0 if self._file is None else self._file.nbytes

    @property
    def disk_bytes_read(self) -> int:
        """Bytes asked of the disk so far, the unwanted parts of blocks included."""
        return 0 if self._file is None else self._file.bytes_read

    @property
    def lanes(self) -> list[Lane]:
        """The ways to the CUDA devices that hold the cache's layers."""
        return list(self._lanes.values())

    @property
    def pinned_share(self) -> float | None:
        """Share of the home in RAM that is pinned; None where no CUDA device asked for it."""
        return self._memory.pinned_share

    def expect(self, tokens: int) -> None:
        """Make the pools that are yet to come for at least so many tokens per row."""
        self._tokens = max(self._tokens, tokens)

    def for_row(self, tokens: int, rows: int) -> Storage:
        """For a cache of one of ``rows`` rows, of ``tokens`` tokens, over the same link and file.

        What is closed with the cache is the row's alone; whoever made this storage closes it.
        """
        row = copy.copy(self)
        row._tokens = tokens
        row._layers = self._layers * rows  # a resident set in bytes is for all rows together
        row._whole = self
        row.close = cast(Any, _nothing)
        return row

    def holds(self, tokens: int) -> bool:
        """Whether a home has room for so many tokens per row, so that none is evicted."""
        limit = self.config.limit(max(self._tokens, tokens))
        return limit is None or tokens <= limit

    def local_pool(self, keys: Tensor, values: Tensor) -> Pool:
        """A pool on the device, for layers that are kept there whole."""
        return LocalPool(keys, values, self._tokens)

    def pool(self, keys: Tensor, values: Tensor) -> Pool:
        """An empty pool for a layer with keys and values like these, ``(B, H_kv, *, D)``."""
        if self.config.is_local_on(keys.device):
            return self.local_pool(keys, values)
        codec = codec_by_name(self.config.codec)
        tokens = max(self._tokens, keys.shape[2])
        limit = self.config.limit(tokens)
        if limit is None:
            home = PackedHome(keys, values, codec, partial(self._store, keys.device), tokens)
        else:
            home = CappedHome(keys, values, codec, partial(self._store, keys.device), limit)
        return LinkedPool(
            home,
            self.link,
            resident=self._resident(keys, values, tokens),
            eviction=None if limit is None else self.config.evict,
            sinks=self._sinks,
            kernels=self._kernels,
        )

    def _store(
        self, device: torch.device, rows: int, heads: int, entry_bytes: int, capacity: int
    ) -> Store:
        """A store for a layer whose keys and values are on ``device``."""
        lane = self._lane(device)
        store: Store
        if self._file is not None:
            store = DiskStore(self._file, rows, heads, entry_bytes, capacity)
        else:
            memory = None if lane is None else self._memory
            store = RamStore(rows, heads, entry_bytes, capacity, memory)
        return store if lane is None else CudaStore(store, lane)

    def _lane(self, device: torch.device) -> Lane | None:
        """The way to a CUDA device, one for all its layers; others move entries one by one."""
        if not needs_lane(device):
            return None
        if device not in self._lanes:
            self._lanes[device] = Lane.on(device, self.config.gather)
        return self._lanes[device]

    def _resident(self, keys: Tensor, values: Tensor, tokens: int) -> int:
        entry = (keys.shape[3] + values.shape[3]) * keys.element_size()
        all_heads = self._layers * keys.shape[0] * keys.shape[1] * entry
        return self.config.resident_entries(keys.device, tokens, all_heads)


def hard_layers(report: Any) -> set[int]:
    """Layers whose prediction misses more than half of the query's power, by a calibration."""
    return {int(layer) for layer, fit in report.items() if fit["unexplained"] > HARD_TO_PREDICT}


def parse_size(name: str, text: str, *, units: bool = True) -> int | float:
    """``20%`` or ``0.2`` to a share, ``512`` or, with ``units``, ``64MiB`` to an int."""
    match = re.fullmatch(r"([0-9.]+)\s*(%|[KMG]iB|B)?", text)
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    unit = match[2] if match and match[2] else ""
    if math.isnan(number) or (unit in UNITS and unit and not units):
        size = "a size like 64MiB" if units else "a number of tokens"
        raise InputError(
            f"{name} {text!r} is not valid: it must be a share like 20% or 0.2, or {size}"
        )
    if unit == "%":
        return number / 100
    if unit == "" and "." in text:
        return number
    return int(number * UNITS[unit])


def _pace(spec: LinkSpec, rate: float | None) -> Pace | None:
    if not spec.is_emulated:
        return None
    used = spec.rate if spec.rate is not None else rate
    if used is None:
        raise InputError(
            "link='emulated:paper' needs the speed of the model: measure it with "
            "infinigen_kv.bench.paper_link_rate and pass new_cache(link_rate=...)"
        )
    return Pace(used, spec.latency)


def _close(file: DiskFile | None, link: Link, lanes: dict[torch.device, Lane]) -> None:
    try:
        if file is not None:
            file.close()
    finally:
        link.close()
        for lane in lanes.values():
            lane.close()


def _nothing() -> None:
    """Nothing is a row's alone but its pools, which its cache closes."""


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
