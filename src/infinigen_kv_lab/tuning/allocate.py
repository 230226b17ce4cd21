"""From what each layer's alpha costs and harms to the alphas that reach a KL for the least.

Harms of layers add up, since small errors of the logits do and KL is quadratic in them, with errors
of different layers independent. So do the entries that they move. What is left is one number, the
price of KL in entries: at a given price each layer's best alpha is its own affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

STEP = 0.125  # between the alphas that a layer may get
TINY = 1e-12  # stands for 0 where logarithms are interpolated
HALVINGS = 60  # of the range of prices


@dataclass(frozen=True, slots=True)
class Curves:
    """What alphas do, measured at a few of them.

    Parameters
    ----------
    alphas
        ``(A,)``, increasing.
    harm
        ``(L, A)``: a layer's part of KL(full || selected), in nats per token.
    entries
        ``(L, A)``: entries that cross the link for a layer, per step.
    """

    alphas: Array
    harm: Array
    entries: Array

    def refined(self) -> Curves:
        """The same at every `STEP`, between the measured ones by logarithms.

        A larger alpha never harms more nor moves less here, and none harms less than nothing,
        whatever noise was measured.
        """
        fine = np.arange(self.alphas[0], self.alphas[-1] + STEP / 2, STEP)
        harm = np.minimum.accumulate(np.maximum(0.0, self.harm), axis=1)
        entries = np.maximum.accumulate(self.entries, axis=1)
        return Curves(fine, self._between(fine, harm), self._between(fine, entries))

    def _between(self, fine: Array, values: Array) -> Array:
        logs = np.log(values + TINY)
        rows = [np.interp(fine, self.alphas, row) for row in logs]
        return np.maximum(0.0, np.exp(np.array(rows)) - TINY)


@dataclass(frozen=True, slots=True)
class Allocation:
    """One alpha for each layer of the curves, and what they come to by the curves."""

    alphas: tuple[float, ...]
    harm: float
    entries: float


def allocate(curves: Curves, target: float) -> Allocation:
    """The alphas whose harms together stay within ``target`` and that move the fewest entries.

    Where no alphas do, the largest ones.
    """
    fine = curves.refined()
    cheap, dear = -30.0, 30.0  # logarithms of the price of a nat, in all entries of the dearest
    scale = max(TINY, float(fine.entries.max())) / max(TINY, float(fine.harm.max()))
    best = _at_price(fine, scale * np.exp(dear))
    if best.harm > target:
        return best
    for _ in range(HALVINGS):
        middle = (cheap + dear) / 2
        tried = _at_price(fine, scale * np.exp(middle))
        if tried.harm <= target:
            best, dear = tried, middle
        else:
            cheap = middle
    return best


def uniform(curves: Curves, target: float) -> Allocation:
    """The smallest single alpha whose harm stays within ``target``; the largest where none does."""
    fine = curves.refined()
    within = np.flatnonzero(fine.harm.sum(0) <= target)
    return _taken(fine, [int(within[0]) if len(within) else -1] * len(fine.harm))


def _at_price(fine: Curves, price: float) -> Allocation:
    cost = fine.entries + price * fine.harm
    # of equals the smaller alpha: it attends to fewer tokens
    return _taken(fine, cost.argmin(axis=1).tolist())


def _taken(fine: Curves, places: Sequence[int]) -> Allocation:
    rows = np.arange(len(places))
    columns = np.array(places)
    return Allocation(
        tuple(float(alpha) for alpha in fine.alphas[columns]),
        float(fine.harm[rows, columns].sum()),
        float(fine.entries[rows, columns].sum()),
    )
