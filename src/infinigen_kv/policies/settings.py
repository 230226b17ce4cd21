"""Settings of the policies that InfiniGen is compared with, validated at construction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from infinigen_kv.checks import check_integer, is_number
from infinigen_kv.errors import InputError

BUDGET = 0.2  # of the cached tokens; what the InfiniGen paper gives H2O


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What the policies with a fixed budget may use.

    Parameters
    ----------
    budget
        Largest share of a row's cached tokens that a step attends to, in (0, 1]. For `paging` the
        share of the cache that may be on the device.
    history
        Scissorhands: queries whose attention counts.
    recent
        Scissorhands: newest tokens that are never dropped.
    sinks
        StreamingLLM: oldest tokens that every step attends to (its published setting).
    page_tokens
        Quest: tokens of a page (its published setting).

    Raises
    ------
    InputError
        If a value is outside its range; names the field, the value and the range.
    """

    budget: float = BUDGET
    history: int = 400
    recent: int = 10
    sinks: int = 4
    page_tokens: int = 16

    def __post_init__(self) -> None:
        given = self.budget
        if not is_number(given) or not 0 < given <= 1:
            raise InputError(
                f"budget={given!r} is not valid: it must be a share of the cached tokens in (0, 1]"
            )
        for name, least in (("history", 1), ("recent", 1), ("sinks", 0), ("page_tokens", 1)):
            check_integer(name, getattr(self, name), least)

    def tokens(self, cached: int, min_context: int) -> int:
        """How many of a row's ``cached`` tokens a step attends to, at least one if there is one.

        All of them in rows shorter than ``min_context``, as under every policy.
        """
        if cached < min_context:
            return cached
        return min(cached, max(1, math.floor(self.budget * cached)))
