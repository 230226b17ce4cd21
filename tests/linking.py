"""Caches with a home apart from the device, for tests of the engine; faults and delays in them."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infinigen_kv import Session
from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv.storage.homes.disk.file import DiskFile
from infinigen_kv.storage.homes.store import RamStore
from infinigen_kv.storage.link import Link
from waiting import PATIENCE

FAST = "emulated:1000"  # far faster than the machine: the path is taken, no time is lost

# Each with `resident_layers=()`, so that every layer's entries have to move.
APART: dict[str, dict[str, Any]] = {
    "emulated": {"link": FAST, "resident": 0},
    "resident-none": {"link": "emulated:1000,1", "resident": 0.0},
    "resident-small": {"link": FAST, "resident": 0.05},  # steps want more than it holds
    "resident-some": {"link": FAST, "resident": 0.5},
    "resident-all": {"link": FAST, "resident": 1.0},
    "disk": {"home": "disk", "resident": 0},
    "disk-resident": {"home": "disk", "resident": 0.5, "queue_depth": 2},
    "disk-resident-all": {"home": "disk", "resident": 1.0},
    "disk-emulated": {"home": "disk", "resident": 0, "link": FAST, "queue_depth": 1},
}


def apart(name: str, folder: Path, **changes: Any) -> StorageConfig:
    """The settings of that name in `APART`."""
    settings = {"resident_layers": (), **APART[name], **changes}
    if settings.get("home") == "disk":
        settings["home_dir"] = folder
    return StorageConfig(**settings)


def local_cache(session: Session, policy: str = "infinigen", tokens: int = 64) -> InfiniGenCache:
    """A cache whose home is the device, with the same selection."""
    storage = StorageConfig(resident_layers=())
    assert storage.is_local
    return session.new_cache(policy=policy, storage=storage, tokens=tokens)


@contextmanager
def without_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Links that are made inside have no threads: disk stores read and write at once."""
    with monkeypatch.context() as patch:
        patch.setattr(Link, "_executor", staticmethod(lambda threads, name: None))
        yield


class _Late:
    def __init__(self, job: Future[Tensor]) -> None:
        self._job = job

    def wait(self) -> Tensor:
        return self._job.result(PATIENCE)


@contextmanager
def delays(monkeypatch: pytest.MonkeyPatch, seed: int, longest: float = 4e-4) -> Iterator[None]:
    """Every transfer in either direction takes a random time more, in a thread of its own."""
    chance = random.Random(seed)

    def late(work: Callable[..., Any]) -> Callable[..., Any]:
        def delayed(*given: Any) -> Any:
            time.sleep(chance.uniform(0, longest))
            return work(*given)

        return delayed

    with ThreadPoolExecutor(3) as threads, monkeypatch.context() as patch:

        def start_read(store: RamStore, slots: Tensor) -> _Late:
            return _Late(threads.submit(late(lambda entries: entries), store.read(slots)))

        def start_read_all(store: RamStore) -> _Late:
            return _Late(threads.submit(late(lambda entries: entries), store.read_all().clone()))

        patch.setattr(RamStore, "start_read", start_read)
        patch.setattr(RamStore, "start_read_all", start_read_all)
        patch.setattr(DiskFile, "read", late(DiskFile.read))
        patch.setattr(DiskFile, "write", late(DiskFile.write))
        yield


def same(actual: Tensor, expected: Tensor) -> bool:
    """Bit for bit, and finite."""
    return torch.equal(actual, expected) and bool(actual.isfinite().all())


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Afterwards there are no more threads and open files than before, and the folder is empty."""
    threads, files = set(threading.enumerate()), open_files()
    yield
    assert set(threading.enumerate()) <= threads
    assert open_files() <= files
    assert not list(folder.iterdir())


def open_files() -> set[str]:
    """What the process has open, by number and target; nothing where no system tells.

    Compare with `<=`: what a forgotten object had open ends whenever that is collected.
    """
    found = set()
    listing = Path("/proc/self/fd")
    for number in listing.iterdir() if listing.exists() else ():
        with suppress(OSError):  # the listing's own is closed by now
            found.add(f"{number.name} {number.readlink()}")
    return found


@contextmanager
def model_unchanged(model: Any) -> Iterator[None]:
    """The model has the hooks and the attention that it had."""
    before = _footprint(model)
    yield
    assert _footprint(model) == before


def _footprint(model: Any) -> list[Any]:
    hooks = [
        [list(getattr(module, kind).values()) for kind in ("_forward_pre_hooks", "_forward_hooks")]
        for module in model.modules()
    ]
    return [model.config._attn_implementation, *hooks]


@contextmanager
def failing(module: nn.Module, failure: BaseException, *, after: int = 0) -> Iterator[None]:
    """The module's forward raises at its call number ``after``, and no other time."""
    calls = itertools.count()

    def fail(*seen: Any) -> None:
        if next(calls) == after:
            raise failure

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()
