"""StreamingLLM: attention sinks and a recent window."""

from __future__ import annotations

import torch
from torch import Tensor

from infinigen_kv.policies.base import Policy
from infinigen_kv.policies.entry import PolicyParts
from infinigen_kv.policies.settings import PolicySettings
from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.select import Selection
from infinigen_kv.storage.pools.pool import Pool
from infinigen_kv_lab.baselines.entries import budgeted, no_state
from infinigen_kv_lab.baselines.scoring import (
    budgets,
    cached_tokens,
    counted,
    side_by_side,
    token_positions,
)


class StreamingLLMPolicy(Policy):
    """The first tokens of a row and the newest ones, as many as the budget allows together.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024
    (arXiv 2309.17453), section 3: four sinks and a window that rolls on.

    Departures:

    - Tokens keep their positions; the authors number them by their place in the cache, which
      matters once a text is longer than the model's positions.
    - The budget is a share of the tokens so far, not a fixed number.
    - The tokens live in the home and cross the link at each step.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._heads = 0
        self._device = torch.device("cpu")

    def plan(self, step: Step, pool: Pool) -> Selection | None:
        """Sinks and window of a step with one query per row."""
        return self._chosen(step) if step.selecting and step.queries == 1 else None

    def select_at_layer(self, query: Tensor, step: Step, pool: Pool) -> Selection | None:
        """As `plan`, in a layer without a predecessor."""
        return self.plan(step, pool)

    def observe(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        step: Step,
        pool: Pool,
        slots: Tensor | None,
    ) -> None:
        self._heads, self._device = keys.shape[1], keys.device

    def select(self, step: Step, pool: Pool) -> Selection | None:
        return self._chosen(step)

    def _chosen(self, step: Step) -> Selection:
        each = [self._of_query(step, query) for query in range(step.queries)]
        return each[0] if len(each) == 1 else side_by_side(each, step.start)

    def _of_query(self, step: Step, query: int) -> Selection:
        counts = budgets(step, self._settings, query)
        place = torch.arange(max(counts), device=self._device)
        rows = [
            torch.where(
                place < min(self._settings.sinks, count - 1), place, place + cached - count
            ).where(place < count, 0)
            for count, cached in zip(counts, cached_tokens(step, query), strict=True)
        ]
        tokens = torch.stack(rows).unsqueeze(1)  # (B or 1, 1, n)
        index = token_positions(tokens.expand(step.rows, self._heads, -1), step)
        return Selection(index.unsqueeze(2), counted(counts, self._device))


def _policy(parts: PolicyParts) -> StreamingLLMPolicy:
    return StreamingLLMPolicy(parts.settings)


STREAMING_LLM = budgeted(
    "streaming-llm", "a fixed budget: the first tokens and the newest ones", _policy, no_state
)
