"""How long a test waits for another thread or process."""

from __future__ import annotations

PATIENCE = 600.0  # seconds, whatever else the machine has to do: over only where something hangs
