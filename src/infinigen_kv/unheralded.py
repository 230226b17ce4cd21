"""The first layer of a model under a policy that selects in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infinigen_kv.offloaded import OffloadedLayer, PoolMaker

if TYPE_CHECKING:
    from infinigen_kv.adapters.base import LayerSpec
    from infinigen_kv.kernels import Kernels
    from infinigen_kv.policies import Policy


class UnheraldedLayer(OffloadedLayer):
    """A layer without a predecessor: its policy chooses at the layer itself, where its entries are
    then waited for. Nothing is moved ahead of it, since what the next step wants is not known.
    """

    def __init__(
        self, spec: LayerSpec, policy: Policy, make_pool: PoolMaker, kernels: Kernels
    ) -> None:
        super().__init__(spec, policy, make_pool, kernels)
        policy.late = True

    def prefetch_next(self) -> None:
        """Nothing to move yet."""
