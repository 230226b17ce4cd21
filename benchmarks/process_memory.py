"""Memory of this process, as Linux counts it; for the other scripts of this folder."""

from __future__ import annotations

import gc
from pathlib import Path


def forget_peak() -> None:
    """Let the largest resident size start from what it is now: loading had its own peak."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (the most since `forget_peak`), in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
