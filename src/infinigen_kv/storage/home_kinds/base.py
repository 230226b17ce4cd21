"""The contract of a kind of home: everything about it that the rest of the engine asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from torch import Tensor

from infinigen_kv.storage.homes.pinned import HostMemory
from infinigen_kv.storage.homes.store import Store
from infinigen_kv.storage.link import Link
from infinigen_kv.storage.pools.pool import Pool

Place = Literal["device", "host", "disk"]


class HomeSettings(Protocol):
    """What a kind may read of a `storage.config.StorageConfig`; fields as there."""

    @property
    def home_dir(self) -> Path | None: ...

    @property
    def queue_depth(self) -> int: ...


@dataclass(frozen=True, slots=True)
class HomeUse:
    """One cache that opens a home.

    Parameters
    ----------
    settings
        Of its storage.
    link
        What moves its entries.
    tokens
        Per row that the cache is made for; 0 if unknown.
    budget
        As in `policies.settings.PolicySettings`, for homes that keep a share of the cache in
        memory.
    """

    settings: HomeSettings
    link: Link
    tokens: int
    budget: float


class OpenHome:
    """A home while one cache uses it."""

    @property
    def bytes_on_disk(self) -> int:
        """Bytes reserved in files."""
        return 0

    @property
    def disk_bytes_read(self) -> int:
        """Bytes asked of a disk so far, the unwanted parts of blocks included."""
        return 0

    @property
    def direct_io(self) -> bool | None:
        """Whether a disk is read past the page cache; None without a disk."""
        return None

    def close(self) -> None:
        """Release what is held outside of memory; may be called twice."""


class StoreHome(OpenHome, ABC):
    """A home of packed entries: each layer has a `Store`, and `LinkedPool` does the rest."""

    @abstractmethod
    def store(
        self, rows: int, heads: int, entry_bytes: int, capacity: int, memory: HostMemory | None
    ) -> Store:
        """An empty store.

        Parameters
        ----------
        rows, heads, entry_bytes, capacity
            B, H_kv, E, and tokens per row to reserve.
        memory
            Gives out host memory that a CUDA device can read; None where none does.
        """


class PoolHome(OpenHome, ABC):
    """A home with pools of its own, for layers whose entries are not packed."""

    @abstractmethod
    def pool(self, keys: Tensor, values: Tensor, tokens: int) -> Pool:
        """An empty pool for keys and values like these, ``(B, H_kv, *, D)``, reserving ``tokens``
        per row.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeShape:
    """The sizes that decide what a home holds for one layer.

    Parameters
    ----------
    rows, heads
        B and H_kv.
    entry_bytes, plain_bytes
        E, one entry as the codec packs it, and unpacked.
    slots, context
        Tokens per row that there is room for, and that there will be.
    budget
        As in `HomeUse`.
    """

    rows: int
    heads: int
    entry_bytes: int
    plain_bytes: int
    slots: int
    context: int
    budget: float


@dataclass(frozen=True, slots=True)
class HomeBytes:
    """Bytes of one layer: in the ``home``, of it on the ``device``, and on the ``host`` beside."""

    home: int
    device: int = 0
    host: int = 0


class HomeKind(ABC):
    """A kind of home; made once, without state."""

    name: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()
    """Fields of `StorageConfig` that mean something to this kind and not to every one."""
    place: ClassVar[Place] = "host"
    """Where a plan counts its bytes."""
    is_host_memory: ClassVar[bool] = False
    """Whether a model on the CPU can attend to entries where they are."""
    is_copyable: ClassVar[bool] = True
    """Whether a cache can be copied."""
    is_advised: ClassVar[bool] = True
    """Whether a run that does not fit is advised to use it."""
    has_stores: ClassVar[bool] = True
    """Whether it opens a `StoreHome`; else a `PoolHome`."""

    def threads(self, settings: HomeSettings) -> int:
        """Threads that the link needs to read its stores; 0 for stores in memory."""
        return 0

    def check(self, settings: HomeSettings) -> None:
        """Raise `InputError` for settings that cannot work, before anything is loaded."""

    @abstractmethod
    def open(self, use: HomeUse) -> OpenHome:
        """For one cache, which closes it."""

    @abstractmethod
    def planned(self, shape: HomeShape) -> HomeBytes:
        """What one layer will hold."""

    def buffers(self, settings: HomeSettings, home_bytes: int, tokens: int) -> int:
        """Host bytes under way between home and device, for ``home_bytes`` of one cache and
        ``tokens`` of all its rows.
        """
        return 0
