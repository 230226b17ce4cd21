"""The contract between the engine and what decides which entries to move."""

from __future__ import annotations

from torch import Tensor

from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.select import Selection
from infinigen_kv.rehearsal.tail import Tail, ValueMap
from infinigen_kv.storage.pools.pool import Pool


class Policy:
    """What one layer of one cache moves.

    The engine calls, in the order of a forward that selects:

    1. while the previous layer computes: `predict` with its attention input, and then `rehearse`
       with the query that this gave, or `plan` where it gave none;
    2. at the layer itself: `select_at_layer`, if the policy `selects_at_layer`;
    3. `observe` once the new tokens are in the home; a forward that is exact calls only this;
    4. `select` when the attention of several queries needs their selections;
    5. `attended` after a single query, if the policy `needs_weights`.

    A `copy.copy` of it, with the cache's tokens as they are just then, goes on as it would have
    itself, whatever either of them sees later.
    """

    selects_at_layer: bool = False
    """Whether the choice needs the layer's own query, so that nothing can be moved ahead of it."""
    needs_weights: bool = False
    """Whether `attended` is to be called."""

    def predict(self, hidden: Tensor, step: Step) -> Tensor | None:
        """This layer's query ``(B, H, Q, D)``, from what the previous layer's attention reads
        after its norm, ``hidden`` ``(B, Q, M)``; None for a policy that does not rehearse.
        """
        return None

    def rehearse(self, query: Tensor, step: Step, pool: Pool) -> Selection | None:
        """Choose entries ahead of time, by the predicted ``query``.

        ``pool`` is this layer's KV without the new tokens. None if the choice must wait for them
        (several queries at once), or for everything.
        """
        return None

    def plan(self, step: Step, pool: Pool) -> Selection | None:
        """As `rehearse`, without a query."""
        return None

    def select_at_layer(self, query: Tensor, step: Step, pool: Pool) -> Selection | None:
        """Choose by the layer's own query ``(B, H, 1, D)``; None for everything."""
        return None

    def observe(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        step: Step,
        pool: Pool,
        slots: Tensor | None,
    ) -> None:
        """See the new tokens' queries ``(B, H, Q, D)``, keys ``(B, H_kv, Q, D)`` and values ``(B,
        H_kv, Q, D_v)``.

        They are in the pool by now, in ``slots`` ``(B, Q)`` (-1: dropped at once), or at the end
        where that is None.
        """

    def finish_prompt(self, keys: Tensor, values: Tensor, step: Step, slots: Tensor | None) -> None:
        """Called after `observe` with what may be a prompt's last tokens (`Step.may_end_prompt`).

        ``keys`` ``(B, H_kv, T, D)`` and ``values`` ``(B, H_kv, T, D_v)`` are all there are by now,
        the new ones last and untouched by any codec. They are on the device, which later only the
        pool can do again.
        """

    def select(self, step: Step, pool: Pool) -> Selection | None:
        """The entries of a step with several queries; None for everything."""
        return None

    def tail(self, selection: Selection) -> Tail | None:
        """What stands for the tokens that ``selection``, of one query per row, leaves out; None for
        nothing, as if they had no weight.
        """
        return None

    def tails(self) -> tuple[PartialKeys, ValueMap] | None:
        """As `tail`, after `select`; for all that there is by now, the new tokens included."""
        return None

    def until_refit(self, length: int) -> int | None:
        """Tokens that one forward on top of ``length`` may bring, if each is to see what it would
        as a decode step of its own; None for any number.
        """
        return None

    def attended(self, weights: Tensor, selection: Selection | None, step: Step) -> None:
        """See the probabilities of a single query's attention.

        ``weights`` ``(B, H_kv, n + 1)`` float32 are summed over a group's query heads. Their
        columns are those of ``selection.index``, or all held slots in order where it is None, and
        then the query's own token.
        """

    def resident_candidates(
        self, count: int, query: Tensor, keys: Tensor, step: Step
    ) -> Tensor | None:
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
        """The tokens from ``length`` on were removed: go on as if they had never come."""

    def take_rows(self, index: Tensor) -> None:
        """The batch became the rows ``index`` ``(n,)`` of itself."""
