"""What a machine has, and what a plan lacks."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from infinigen_kv import InputError, StorageConfig
from infinigen_kv.memory import (
    Budget,
    MemoryPlan,
    Part,
    PlanRequest,
    budget,
    machine_budget,
    model_request,
    shortfalls,
)
from infinigen_kv.memory.budget import available_memory, control_group_memory

GIB = 2**30


def request(**settings: Any) -> PlanRequest:
    return model_request(tiny.llama(), context=100, **settings)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GiB available, 3 GiB free on disk, no control groups."""
    monkeypatch.setattr(budget.psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    monkeypatch.setattr(budget.shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * GIB))
    monkeypatch.setattr(budget, "control_group_memory", lambda: None)


def test_on_a_cpu_what_is_available_counts(machine: None) -> None:
    run = request()
    assert machine_budget(run) == Budget(8 * GIB, None, 3 * GIB)
    weights = run.geometry.weight_bytes
    assert machine_budget(run, loaded=True) == Budget(8 * GIB + weights, None, 3 * GIB)
    assert machine_budget(run, loaded=True, device_memory=5).device == 5


def test_on_a_cuda_device(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run = request(device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GIB)
    assert machine_budget(run) == Budget(24 * GIB, 8 * GIB, 3 * GIB)
    loaded = machine_budget(run, loaded=True)
    assert loaded == Budget(4 * GIB + run.geometry.weight_bytes, 8 * GIB, 3 * GIB)
    assert machine_budget(run, device_memory=1, host_memory=2) == Budget(1, 2, 3 * GIB)


def test_a_card_that_is_not_there_needs_a_size(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    run = request(device=torch.device("cuda", 1))
    with pytest.raises(InputError, match=r"device cuda:1: .* 0 CUDA devices: .*--device-memory"):
        machine_budget(run)
    assert machine_budget(run, device_memory=7).device == 7


def test_the_disk_is_that_of_the_folder(tmp_path: Path) -> None:
    free = machine_budget(request(storage=StorageConfig(home="disk", home_dir=tmp_path))).disk
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)
    missing = StorageConfig(home="disk", home_dir=tmp_path / "missing")
    with pytest.raises(InputError, match="home_dir"):
        machine_budget(request(storage=missing))


def group(folder: Path, limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 9\n")


@pytest.mark.parametrize(
    ("inner", "outer", "left"),
    [
        (("1000", 300, 50), ("max", 900, 0), 750),
        (("1000", 300, 50), ("400", 350, 10), 60),
        (("max", 300, 50), ("max", 350, 10), None),
        (("200", 300, 0), ("max", 350, 10), 0),
    ],
)
def test_limits_of_control_groups(
    tmp_path: Path,
    inner: tuple[str, int, int],
    outer: tuple[str, int, int],
    left: int | None,
) -> None:
    root, own = tmp_path / "groups", tmp_path / "own"
    group(root / "outer", *outer)
    group(root / "outer" / "inner", *inner)
    own.write_text("0::/outer/inner\n")
    assert control_group_memory(root, own) == left


def test_no_control_groups(tmp_path: Path) -> None:
    assert control_group_memory(tmp_path, tmp_path / "none") is None
    (tmp_path / "old").write_text("5:memory:/somewhere\n")
    assert control_group_memory(tmp_path, tmp_path / "old") is None
    (tmp_path / "gone").write_text("0::/gone\n")
    assert control_group_memory(tmp_path, tmp_path / "gone") is None


def test_a_control_group_limits_what_is_available(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "control_group_memory", lambda: GIB)
    assert available_memory() == GIB
    monkeypatch.setattr(budget, "control_group_memory", lambda: 9 * GIB)
    assert available_memory() == 8 * GIB


def test_shortfalls_by_place() -> None:
    plan = MemoryPlan((Part("a", device=100, host=50, disk=30),), (), unified=False)
    assert shortfalls(plan, Budget(100, 50, 30)) == []
    lacking = shortfalls(plan, Budget(99, 50, 10))
    assert [(each.place, each.missing) for each in lacking] == [("device", 1), ("disk", 20)]
    together = MemoryPlan(plan.parts, (), unified=True)
    assert shortfalls(together, Budget(150, None, 30)) == []
    (lack,) = shortfalls(together, Budget(149, None, 30))
    assert (lack.place, lack.needed, lack.missing) == ("device", 150, 1)
