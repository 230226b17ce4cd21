"""The kinds of home by name: the engine's own here, others by the entry points of packages."""

from __future__ import annotations

from infinigen_kv.registry import Registry
from infinigen_kv.storage.home_kinds.base import HomeKind
from infinigen_kv.storage.home_kinds.disk import DiskKind
from infinigen_kv.storage.home_kinds.memory import DeviceKind, RamKind

GROUP = "infinigen_kv.homes"
"""Entry points of packages with homes: each names a sequence of `HomeKind` objects."""

HOMES: Registry[HomeKind] = Registry("home", GROUP, (RamKind(), DiskKind(), DeviceKind()))
"""Every kind; `Registry.register` adds one for this process."""
