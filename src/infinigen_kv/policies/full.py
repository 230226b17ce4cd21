"""Everything, every step: the reference."""

from __future__ import annotations

from torch import Tensor

from infinigen_kv.policies.base import Policy
from infinigen_kv.pool.pool import Pool
from infinigen_kv.rehearsal.select import Selection
from infinigen_kv.step import Step


class FullPolicy(Policy):
    """Attend to all entries; also what the layers that cannot be rehearsed use."""

    def rehearse(self, hidden: Tensor, step: Step, pool: Pool) -> Selection | None:
        return None

    def observe(
        self, query: Tensor, keys: Tensor, step: Step, pool: Pool, slots: Tensor | None
    ) -> None:
        return None

    def select(self, step: Step, pool: Pool) -> Selection | None:
        return None
