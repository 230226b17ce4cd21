"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

CPU_INFO = Path("/proc/cpuinfo")


def processor(device: torch.device) -> str:
    """Name of the CPU, or of the CUDA device that the model runs on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return " ".join(value.split())
    return platform.processor() or platform.machine()


def machine_facts(device: torch.device) -> dict[str, str]:
    """For the page, in words."""
    memory = psutil.virtual_memory().total / 2**30
    facts = {
        "processor": processor(torch.device("cpu")),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "memory": f"{memory:.0f} GiB",
        "system": platform.system(),
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        "Transformers": version("transformers"),
        "infinigen-kv": version("infinigen-kv"),
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        facts["GPU"] = f"{card.name}, {card.total_memory / 2**30:.0f} GiB"
    return facts
