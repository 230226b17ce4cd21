"""What a pool is told at the end of a prompt: the tokens that the first steps will want."""

from __future__ import annotations

from torch import Tensor

from infinigen_kv.policies.base import Policy
from infinigen_kv.policies.step import Step
from infinigen_kv.storage.pools.pool import Pool


def hint_of_prompt(
    policy: Policy,
    pool: Pool,
    step: Step,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor | None,
) -> None:
    """A prompt's KV passes through the device: let the pool keep what will be wanted soon.

    Each row gets the hint that it would get alone: padding is no token, whether it had to go or
    not, and a row of which a real token had to go gets none.

    Parameters
    ----------
    query, keys, values
        The prompt's, ``(B, H, Q, D)`` and ``(B, H_kv, T, D)``.
    slots
        ``(B, T)`` where the pool put them, -1 for those that had to go; None for their positions.
    """
    if slots is not None and step.start > 0:
        return  # the order of the keys is not that of the slots
    tokens = policy.resident_candidates(pool.resident_budget, query, keys, step)
    if tokens is None:
        return
    wanted = tokens.clamp(min=0)
    held = tokens
    if slots is not None:
        slots = slots.to(tokens.device)
        lost = slots < 0 if step.visible is None else (slots < 0) & step.visible.to(slots.device)
        places = slots[:, None].expand(-1, tokens.shape[1], -1).gather(2, wanted)
        held = places.masked_fill((tokens < 0) | lost.any(dim=1)[:, None, None], -1)
    pool.fill_resident(held, _of_tokens(keys, wanted), _of_tokens(values, wanted))


def _of_tokens(numbers: Tensor, tokens: Tensor) -> Tensor:
    """``numbers`` ``(B, H_kv, T, D)`` of ``tokens`` ``(B, H_kv, n)``."""
    index = tokens.to(numbers.device).unsqueeze(-1)
    return numbers.gather(2, index.expand(-1, -1, -1, numbers.shape[3]))
