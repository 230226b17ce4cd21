"""Everything, every step: the reference."""

from __future__ import annotations

from torch import Tensor

from infinigen_kv.policies.base import Policy
from infinigen_kv.pool import Home
from infinigen_kv.rehearsal.select import Selection
from infinigen_kv.step import Step


class FullPolicy(Policy):
    """Attend to all entries; also what the layers that cannot be rehearsed use."""

    def rehearse(self, hidden: Tensor, step: Step, home: Home) -> Selection | None:
        return None

    def observe(self, query: Tensor, keys: Tensor, step: Step, home: Home) -> None:
        return None

    def select(self, step: Step, home: Home) -> Selection | None:
        return None
