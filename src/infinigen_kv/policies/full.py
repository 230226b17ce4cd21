"""Everything, every step: the reference."""

from __future__ import annotations

from infinigen_kv.policies.base import Policy


class FullPolicy(Policy):
    """Attend to all entries; also what the layers that cannot be rehearsed use."""
