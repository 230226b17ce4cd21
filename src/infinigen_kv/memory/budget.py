"""How much memory there is, and what a plan lacks."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from infinigen_kv.errors import InputError
from infinigen_kv.memory.plan import PLACES, MemoryPlan
from infinigen_kv.memory.request import PlanRequest
from infinigen_kv.storage.home_kinds.base import Place
from infinigen_kv.storage.homes.disk.scratch import existing

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that a run may use; ``host`` is None where that is the device's memory."""

    device: int
    host: int | None
    disk: int

    def at(self, place: Place) -> int | None:
        """Bytes at that place."""
        nbytes: int | None = getattr(self, place)
        return nbytes


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Where a plan needs more than there is."""

    place: Place
    needed: int
    available: int

    @property
    def missing(self) -> int:
        """Bytes."""
        return self.needed - self.available


def shortfalls(plan: MemoryPlan, budget: Budget) -> list[Shortfall]:
    """Where the plan does not fit; empty if it does."""
    found = [(place, plan.total(place), budget.at(place)) for place in PLACES]
    return [
        Shortfall(place, needed, there)
        for place, needed, there in found
        if there is not None and needed > there
    ]


def machine_budget(
    request: PlanRequest,
    *,
    device_memory: int | None = None,
    host_memory: int | None = None,
    loaded: bool = False,
) -> Budget:
    """What this machine has for a run, unless the caller knows better.

    Parameters
    ----------
    request
        The run; its device and the folder of its disk home count.
    device_memory, host_memory
        Bytes; None for a CUDA device's own memory, and for the host what is available now.
    loaded
        The weights are in memory already: then of a CUDA device, too, what is free now counts.

    Raises
    ------
    InputError
        The device is not there, and ``device_memory`` is None.
    """
    host = available_memory() if host_memory is None else host_memory
    weights = request.geometry.weight_bytes if loaded else 0
    if request.unified:
        device = host + weights if device_memory is None else device_memory
        return Budget(device, None, _free_disk(request))
    if device_memory is None:
        device_memory = _card_memory(request.device, loaded) + weights
    return Budget(device_memory, host, _free_disk(request))


def available_memory() -> int:
    """Bytes that a process can have without swapping, within its control group's limit."""
    free = int(psutil.virtual_memory().available)
    limit = control_group_memory()
    return free if limit is None else min(free, limit)


def control_group_memory(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int | None:
    """What the process's control groups (version 2; containers have one) still allow.

    None where there are none, or none has a limit.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    names = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    if not names:
        return None
    folder = root / names[0]
    groups = [each for each in (folder, *folder.parents) if each.is_relative_to(root)]
    left = [amount for amount in map(_left_in_group, groups) if amount is not None]
    return min(left, default=None)


def _left_in_group(folder: Path) -> int | None:
    """Of one group; cached files count as free, since the system drops them first."""
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):  # no such file, or "max"
        return None
    counts = dict(line.split(" ", 1) for line in stat.splitlines() if " " in line)
    return max(0, limit - used + int(counts.get("inactive_file", 0)))


def _card_memory(device: torch.device, loaded: bool) -> int:
    if (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device {device}: this machine shows {torch.cuda.device_count()} CUDA devices: say "
            "how much memory yours has, e.g. --device-memory 24GiB"
        )
    free, total = torch.cuda.mem_get_info(device)
    if not loaded:
        return total
    # PyTorch keeps what was freed, and gives it out again
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _free_disk(request: PlanRequest) -> int:
    if request.storage.kind.place != "disk":
        return shutil.disk_usage(_folder(request)).free
    return shutil.disk_usage(existing(request.storage.home_dir)).free


def _folder(request: PlanRequest) -> str | os.PathLike[str]:
    """Where a disk home would be; no error while none is asked for."""
    try:
        return existing(request.storage.home_dir)
    except InputError:
        return os.curdir
