"""The way to a CUDA device: hand-offs under the latest allowed order, pinning and its fall-back.

Streams that run late (tests/late_streams.py) stand for the GPU. What needs a real one is marked
`gpu`; `make gpu-check` does more.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tiny
from calibrating import calibrate_tiny, feed, run, selecting, tokens
from infinigen_kv import Calibration, attach
from infinigen_kv.errors import CacheStateError, InputError
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv.storage.homes.disk.file import DiskFile
from infinigen_kv.storage.homes.disk.store import DiskStore
from infinigen_kv.storage.homes.pinned import HostMemory
from infinigen_kv.storage.homes.store import RamStore
from infinigen_kv.storage.link import lane as lane_module
from infinigen_kv.storage.link.cuda import CudaStore
from infinigen_kv.storage.link.lane import Lane
from infinigen_kv.storage.link.staging import StagingRing
from infinigen_kv.storage.storage import Storage
from late_streams import LateStreams, late_lane, pretend_cuda, pretend_to_pin
from waiting import PATIENCE

ROWS, HEADS, ENTRY = 2, 3, 10
FAST = "emulated:1000"
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


def entries(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, HEADS, count, ENTRY)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def slots_below(length: int, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, length, (ROWS, HEADS, count), generator=generator)


def at(held: Tensor, slots: Tensor) -> Tensor:
    return held.gather(2, slots.unsqueeze(3).expand(-1, -1, -1, ENTRY))


def ram(memory: HostMemory | None = None, capacity: int = 0) -> RamStore:
    return RamStore(ROWS, HEADS, ENTRY, capacity, memory or HostMemory(2**20))


# Staging: a buffer is filled anew only after the copy out of it.


def test_staging_buffer_waits_for_its_copy_before_it_is_used_again() -> None:
    ring, streams = StagingRing(2), LateStreams()
    targets = []
    for number in range(5):
        buffer = ring.take()
        staged = buffer.claim((3,), lambda size: torch.empty(size, dtype=torch.uint8))
        staged.fill_(number)
        targets.append(streams.empty((3,)))
        streams.copy("down", targets[-1], staged)
        buffer.release(streams.record("down"))
        assert streams.queues["down"].done == max(0, number - 1), "waits for no more than it must"
    streams.record("down").synchronize()
    assert [target.tolist() for target in targets] == [[number] * 3 for number in range(5)]


def test_staging_buffer_grows_and_stays() -> None:
    sizes: list[int] = []

    def allocate(size: int) -> Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    buffer = StagingRing(1).take()
    for shape in ((2, 3), (2, 2), (4, 3)):
        assert buffer.claim(shape, allocate).shape == shape
    assert sizes == [6, 12]


# A store behind a lane equals a plain list of entries, whatever is late.

OPERATIONS = st.lists(
    st.sampled_from(["append", "write", "read", "read_all", "truncate", "take_rows", "collect"]),
    max_size=30,
)


@pytest.mark.parametrize("gather", ["host", "device", "auto"])
@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.randoms(use_true_random=False))
def test_store_behind_a_lane_equals_plain_tensors(
    gather: Any, operations: list[str], chance: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pretend_to_pin(patch)
        lane, _ = late_lane(gather)
        store = CudaStore(ram(), lane)
        held = entries(0)
        expected: list[tuple[Any, Tensor]] = []
        for number, operation in enumerate(["append", *operations, "collect"]):
            length = held.shape[2]
            if operation == "append":
                new = entries(chance.choice([1, 1, 5, 300]), number)
                store.append(new)
                held = torch.cat([held, new], dim=2)
            elif operation == "collect":
                for pending, wanted in expected:
                    assert torch.equal(pending.wait(), wanted)
                expected = []
            elif length == 0:
                continue
            elif operation == "write":
                new, slots = entries(2, number), torch.tensor([[0, -1], [-1, length - 1]])
                store.write(slots, new)
                held = held.clone()
                held[0, :, 0] = new[0, :, 0]
                held[1, :, length - 1] = new[1, :, 1]
            elif operation == "read":
                slots = slots_below(length, 4, number)
                expected.append((store.start_read(slots), at(held, slots)))
            elif operation == "read_all":
                expected.append((store.start_read_all(), held))
            elif operation == "truncate":
                keep = chance.randrange(length + 1)
                store.truncate(keep)
                held = held[:, :, :keep]
            else:
                index = torch.tensor(chance.choice([[1, 0], [0, 0]]))
                store.take_rows(index)
                held = held[index]
            assert store.length == held.shape[2]
        assert torch.equal(store.read_all(), held)


def test_append_does_not_wait_and_is_there_for_the_next_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_to_pin(monkeypatch)
    lane, streams = late_lane("host")
    store, new = CudaStore(ram(), lane), entries(3)
    store.append(new)
    assert store.length == 3 and store.inner.length == 0 and streams.queues["up"].done == 0
    assert torch.equal(store.read(slots_below(3, 5)), at(new, slots_below(3, 5)))
    assert store.inner.length == 3


def test_memory_that_is_being_read_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_pin(monkeypatch)
    lane, streams = late_lane("device")
    store = CudaStore(ram(), lane)
    store.append(entries(200))
    store.start_read(slots_below(200, 4))
    assert streams.queues["down"].waiting
    store.append(entries(200, 1))  # the store's memory has to grow
    assert not streams.queues["down"].waiting


def test_gather_on_the_device_needs_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_pin(monkeypatch)
    lane, streams = late_lane("device")
    monkeypatch.setattr(streams, "gather_rows", None)
    store = CudaStore(RamStore(ROWS, HEADS, ENTRY), lane)  # pageable
    store.append(entries(4))
    assert torch.equal(store.read(slots_below(4, 6)), at(entries(4), slots_below(4, 6)))
    assert streams.copies == 2, "one up, one down from staging"


def test_kernel_that_does_not_run_leaves_the_gather_to_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend_to_pin(monkeypatch)

    def broken(source: Tensor, index: Tensor, target: Tensor) -> None:
        raise RuntimeError("Failed to find C compiler")

    lane = Lane(LateStreams(), "auto", broken)
    store = CudaStore(ram(), lane)
    store.append(entries(4))
    assert torch.equal(store.read(slots_below(4, 6)), at(entries(4), slots_below(4, 6)))
    assert lane.gather == "host" and "Failed to find C compiler" in caplog.text


def test_disk_store_behind_a_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_pin(monkeypatch)
    file = DiskFile(tmp_path)
    store = CudaStore(DiskStore(file, ROWS, HEADS, ENTRY), late_lane()[0])
    first, second = entries(700), entries(50, 1)
    store.append(first)
    store.append(second)
    held, slots = torch.cat([first, second], dim=2), slots_below(750, 40)
    assert torch.equal(store.read(slots), at(held, slots))
    assert torch.equal(store.read_all(), held)
    store.close()
    file.close()


def test_copy_of_a_store_is_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_pin(monkeypatch)
    store = CudaStore(ram(), late_lane()[0])
    store.append(entries(4))
    other = copy.deepcopy(store)
    other.append(entries(2, 1))
    store.append(entries(1, 2))
    assert torch.equal(other.read_all(), torch.cat([entries(4), entries(2, 1)], dim=2))
    assert torch.equal(store.read_all(), torch.cat([entries(4), entries(1, 2)], dim=2))


def test_device_that_is_lost_does_not_keep_a_store_open(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_pin(monkeypatch)
    lane, streams = late_lane("device")
    store = CudaStore(ram(), lane)
    store.append(entries(4))
    store.start_read(slots_below(4, 2))

    def lost() -> None:
        raise RuntimeError("CUDA error: device lost")

    streams.queues["down"].waiting.insert(0, lost)
    with pytest.raises(RuntimeError, match="device lost"):
        store.truncate(1)
    streams.queues["down"].waiting.insert(0, lost)
    store.close()


# Pinned memory.


def test_memory_is_pinned_within_the_budget_and_given_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend_to_pin(monkeypatch)
    memory = HostMemory(64 + 64)
    first = memory.empty((4, 15), torch.uint8)
    assert (memory.pinned_share, caplog.text) == (1.0, "")
    second = memory.empty((10, 2), torch.int16)
    third = memory.empty((60,), torch.uint8)
    assert (memory.pinned_bytes, memory.pageable_bytes) == (100, 60)
    assert caplog.text.count("pinned_bytes=128") == 1
    fourth = memory.empty((1,), torch.uint8)
    assert len(caplog.records) == 1, "one warning for all"
    del first, fourth
    gc.collect()
    assert (memory.pinned_bytes, memory.pageable_bytes) == (40, 60)
    assert memory.pinned_share == 0.4
    del second, third
    gc.collect()
    assert memory.pinned_share is None


def test_memory_that_cannot_be_pinned_is_pageable_and_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = torch.empty

    def refusing(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", refusing)
    memory = HostMemory(2**20)
    store = CudaStore(ram(memory), late_lane()[0])
    for number in range(3):
        store.append(entries(200, number))
    held = torch.cat([entries(200, number) for number in range(3)], dim=2)
    slots = slots_below(600, 9)
    assert torch.equal(store.read(slots), at(held, slots))
    assert memory.pinned_share == 0.0
    assert isinstance(store.inner, RamStore) and not store.inner.is_pinned
    assert [each.levelno for each in caplog.records] == [logging.WARNING]
    assert "refuses to pin" in caplog.text


@pytest.mark.parametrize("value", [-1, 1.5, True, "all"])
def test_pinned_bytes_is_checked(value: Any) -> None:
    with pytest.raises(InputError, match=r"pinned_bytes=.*half of the machine's memory"):
        StorageConfig(pinned_bytes=value)


def test_gather_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"gather='gpu' is not valid: .*auto, host, device"):
        StorageConfig(gather="gpu")  # type: ignore[arg-type]
    monkeypatch.setattr(lane_module, "_kernel", lambda: None)
    with pytest.raises(InputError, match="gather='device' needs triton"):
        Lane.on(torch.device("cuda:0"), "device")


@pytest.mark.parametrize(
    "changes", [{"codec": "int8"}, {"capacity": 9}, {"resident": 0.5}, {"link": FAST}]
)
def test_home_on_the_device_keeps_all_as_it_is(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="home='device' keeps all KV as it is"):
        StorageConfig(home="device", **changes)


# Devices.


def test_memory_of_the_host_is_the_device_only_on_a_cpu() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    assert StorageConfig().is_local_on(cpu) and not StorageConfig().is_local_on(gpu)
    assert StorageConfig(home="device").is_local_on(gpu)
    assert StorageConfig().resident_budget_on(gpu) == 0.2
    assert StorageConfig().resident_budget_on(cpu) == 0


def test_every_device_has_a_lane_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lane, "on", lambda device, gather: late_lane(gather)[0])
    storage = Storage(StorageConfig(), rate=None, tokens=8, layers=3)
    first, second, again = (
        storage._store(torch.device("cuda", number), ROWS, HEADS, ENTRY, 4) for number in (0, 1, 0)
    )
    assert isinstance(first, CudaStore) and isinstance(second, CudaStore)
    assert isinstance(again, CudaStore)
    assert first._lane is again._lane and first._lane is not second._lane
    assert isinstance(storage._store(torch.device("cpu"), ROWS, HEADS, ENTRY, 4), RamStore)


def test_layer_that_moves_to_another_device_is_refused(llama: tuple[Any, Calibration]) -> None:
    with attach(*llama, selecting()) as session:
        cache = session.new_cache()
        run(session.model, cache, tokens(1, 12), prompt=10)
        moved = torch.empty(1, 2, 1, 16, device="meta")
        with pytest.raises(CacheStateError, match="layer 0 moved from cpu to meta"):
            cache.layers[0].update(moved, moved)


# The engine through late streams, bit for bit.

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"resident": 0, "link": FAST},
    "resident": {"resident": 0.4},
    "int8": {"resident": 0.4, "codec": "int8"},
    "capped": {"resident": 0, "capacity": 30, "evict": "lru"},
    "capped-int4": {"resident": 0.3, "capacity": 34, "codec": "int4"},
    "disk": {"resident": 0.4, "home": "disk"},
}


def conversation(session: Any, storage: StorageConfig, policy: str) -> Tensor:
    """Logits over a prompt, steps, and where nothing was evicted crops, copies and new rows."""
    model, ids = session.model, tokens(2, 70)
    cache = session.new_cache(storage=storage, policy=policy, tokens=70)
    seen = [run(model, cache, ids[:, :46], prompt=40)]
    if storage.capacity is None:
        cache.crop(-4)
        seen.append(feed(model, cache, ids, None, slice(42, 43)))
        if storage.home == "ram":
            other = copy.deepcopy(cache)
            seen.append(feed(model, other, ids, None, slice(50, 53)))
        cache.reorder_cache(torch.tensor([1, 0]))
    seen.extend(feed(model, cache, ids, None, slice(at, at + 1)) for at in range(53, 60))
    cache.close()
    return torch.cat(seen, dim=1)


@pytest.mark.parametrize("policy", ["infinigen", "stream"])
@pytest.mark.parametrize("gather", ["host", "device"])
@pytest.mark.parametrize("name", SETTINGS)
def test_late_streams_change_nothing(
    llama: tuple[Any, Calibration],
    name: str,
    gather: Any,
    policy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder: Any = {"home_dir": tmp_path} if SETTINGS[name].get("home") == "disk" else {}
    storage = StorageConfig(**SETTINGS[name], resident_layers=(), gather=gather, **folder)
    with attach(*llama, selecting()) as session:
        # as on a CUDA device, `resident` is not 0 or everything is moved: never the local pool
        monkeypatch.setattr(StorageConfig, "is_local_on", lambda self, device: False)
        expected = conversation(session, storage, policy)
        streams = pretend_cuda(monkeypatch)
        actual = conversation(session, storage, policy)
    assert torch.equal(actual, expected) and bool(actual.isfinite().all())
    assert len(streams) == 1 and streams[0].copies > 0


def test_cache_reports_how_much_of_its_home_is_pinned(
    llama: tuple[Any, Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cuda(monkeypatch)
    with attach(*llama, selecting()) as session:
        shares = []
        for budget in (None, 0):
            storage = StorageConfig(link=FAST, resident_layers=(), pinned_bytes=budget)
            cache = session.new_cache(storage=storage)
            run(session.model, cache, tokens(1, 12), prompt=10)
            shares.append(cache.storage.pinned_share)
            cache.close()
            gc.collect()
            assert cache.storage.pinned_share is None, "closed: no pinned memory left"
    assert shares == [1.0, 0.0]


# The Triton kernel.

KERNEL = """
import torch
from infinigen_kv.storage.link.triton_gather import gather_rows

generator = torch.Generator().manual_seed(0)
for width in (1, 2, 6, 64, 100, 256, 384):
    source = torch.randint(0, 256, (37, width), dtype=torch.uint8, generator=generator)
    index = torch.randint(0, 37, (11,), generator=generator)
    target = torch.zeros(13, width, dtype=torch.uint8)
    gather_rows(source, index, target[1:12])
    assert torch.equal(target[1:12], source[index]), width
    assert not target[0].any() and not target[12].any(), width
gather_rows(source, index[:0], target[:0])
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_gather_equals_index_select() -> None:
    result = subprocess.run(
        [sys.executable, "-c", KERNEL],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert result.stdout == "equal\n", result.stderr


# On a real device.


@pytest.mark.parametrize(
    "gather", [pytest.param("host", marks=needs_gpu), pytest.param("device", marks=needs_gpu)]
)
def test_store_on_a_cuda_device(gather: Any) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    if gather == "device":
        pytest.importorskip("triton")
    store = CudaStore(ram(), Lane.on(device, gather))
    held = entries(0)
    for number in range(40):
        new = entries(1 + number % 3, number)
        store.append(new.to(device))
        held = torch.cat([held, new], dim=2)
        slots = slots_below(held.shape[2], 7, number)
        found = store.read(slots.to(device))
        assert found.device == device and torch.equal(found.cpu(), at(held, slots))
    assert torch.equal(store.read_all().cpu(), held)
