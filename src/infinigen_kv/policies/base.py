"""The contract between the engine and what decides which entries to move."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from infinigen_kv.pool.pool import Pool
from infinigen_kv.rehearsal.select import Selection
from infinigen_kv.step import Step


class Policy(ABC):
    """What one layer of one cache moves.

    The engine calls, in the order of a forward:

    1. `rehearse` with the previous layer's attention input, if the step selects;
    2. `observe` once the new tokens are in the home;
    3. `select` when the attention needs the selection, if `rehearse` did not return it already.
    """

    @abstractmethod
    def rehearse(self, hidden: Tensor, step: Step, pool: Pool) -> Selection | None:
        """Choose entries ahead of time.

        Parameters
        ----------
        hidden
            ``(B, Q, M)``: what the previous layer's attention reads, after its norm.
        step, pool
            The forward, and this layer's KV without the new tokens.

        Returns
        -------
        Selection or None
            None if the choice must wait for the new tokens (several queries at once) or if the
            policy wants everything.
        """

    @abstractmethod
    def observe(
        self, query: Tensor, keys: Tensor, step: Step, pool: Pool, slots: Tensor | None
    ) -> None:
        """See the new tokens' queries ``(B, H, Q, D)`` and keys ``(B, H_kv, Q, D)``.

        They are in the pool by now, in ``slots`` ``(B, Q)`` (-1: dropped at once), or at the end
        where that is None.
        """

    @abstractmethod
    def select(self, step: Step, pool: Pool) -> Selection | None:
        """The entries of a step with several queries; None for everything."""

    def likely(self, count: int, query: Tensor, keys: Tensor, step: Step) -> Tensor | None:
        """Tokens ``(B, H_kv, n)``, n at most ``count``, that the steps after a prompt may want.

        ``query`` ``(B, H, Q, D)`` are the prompt's, ``keys`` ``(B, H_kv, T, D)`` all there are by
        now. None for no idea.
        """
        return None

    @property
    def nbytes(self) -> int:
        """Bytes that the policy itself keeps on the device."""
        return 0

    def truncate(self, length: int) -> None:
        """The tokens from ``length`` on were removed."""

    def take_rows(self, index: Tensor) -> None:
        """The batch became the rows ``index`` ``(n,)`` of itself."""
