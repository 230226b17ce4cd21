"""Settings beside alpha: what else the same device memory may be used for, and whether it pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from infinigen_kv.progress import Progress
from infinigen_kv_lab.tuning.allocate import Curves, allocate
from infinigen_kv_lab.tuning.device_share import DeviceShare
from infinigen_kv_lab.tuning.options import MAX_FETCH, TuneOptions
from infinigen_kv_lab.tuning.search import ALPHAS, Search
from infinigen_kv_lab.tuning.trial import Trial

RATIOS = (0.25, 0.375, 0.5)
MOST_LAYERS = 3  # that are tried as whole ones beside those that are anyway
TIGHT = 0.7  # of the resident set, so that it also holds what earlier steps wanted
MARGIN = 0.05  # of link bytes that other settings must save
EVERY = 2  # windows; the others are left out of probes
FAR = 0.25  # difference of two KLs, as logarithms, beyond which bytes are not carried over
NEAR = 1.25  # factor of a KL within which its exchange rate for bytes is taken


@dataclass(frozen=True, slots=True)
class Alternative:
    """Other settings at equal device memory, and what they save.

    ``saved`` is the share of the link bytes at the KL of the best alphas before, on the windows of
    the probe; NaN where that KL was not reached. ``adopted`` says whether a search of their own
    alphas confirmed it.
    """

    options: TuneOptions
    saved: float
    adopted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        config, storage = self.options.config(), self.options.storage
        return {
            "partial_ratio": config.partial_ratio,
            "max_fetch": config.max_fetch,
            "resident": self.options.resident_share,
            "resident_layers": None
            if storage.resident_layers == "auto"
            else list(storage.resident_layers),
            "bytes_saved": None if math.isnan(self.saved) else self.saved,
            "adopted": self.adopted,
        }


class Alternatives:
    """Tries other settings around a finished search.

    Parameters
    ----------
    search
        Of the settings as they are given. Afterwards the one whose settings are best.
    given
        What the user wants, which stays.
    progress
        Wraps the lists of what is to be done.
    """

    def __init__(self, search: Search, given: TuneOptions, progress: Progress) -> None:
        self.search = search
        self.tried: list[Alternative] = []
        self._given = given
        self._progress = progress

    def explore(self) -> None:
        """Partial ratio and ``max_fetch`` together, then layers to keep whole."""
        share = self._given.resident_share
        if share is None or self._given.alpha_only:
            return
        self._try(self._ratios(share), "trying partial ratios")
        self._try(self._layers(), "trying resident layers")

    def _ratios(self, resident: float) -> list[TuneOptions]:
        given, options = self._given, self.search.options
        config = options.config()
        device = DeviceShare.of(self.search.trials, options)
        size = device.size(config.partial_ratio, resident)
        shares = {config.partial_ratio: resident}
        if given.partial_ratio is None and given.resident is None:
            shares |= {r: share for r in RATIOS if (share := device.resident(size, r)) is not None}
            shares[config.partial_ratio] = resident
        found = []
        for ratio, share in sorted(shares.items()):
            own = ratio == config.partial_ratio
            other = options if own else replace(options, partial_ratio=ratio, resident=share)
            for fetch in self._fetches(share, own=own):
                each = replace(other, max_fetch=fetch)
                if not own or each.config() != config:
                    found.append(each)
        return found

    def _fetches(self, share: float, *, own: bool) -> tuple[float | None, ...]:
        """Values of ``max_fetch`` to try with a partial ratio, None for what the set holds."""
        if self._given.max_fetch is not None:
            return (self._given.max_fetch,)
        if own and share:
            return (None, MAX_FETCH, round(TIGHT * share, 4))
        # the target may be out of reach with less
        return (None,) if self.search.options.max_fetch is None else (None, MAX_FETCH)

    def _layers(self) -> list[TuneOptions]:
        given, options = self._given, self.search.options
        if given.resident is not None or given.resident_layers is not None:
            return []
        share = options.resident_share
        assert share is not None
        ratio = options.config().partial_ratio
        device = DeviceShare.of(self.search.trials, options)
        size = device.size(ratio, share)
        found = []
        for more, layers in enumerate(_relieving(self.search), 1):
            left = device.resident(size, ratio, more)
            if left is not None:
                kept = tuple(sorted({*device.whole, *layers}))
                fetch = options.max_fetch
                if given.max_fetch is None and fetch is not None and fetch < share:
                    fetch = round(TIGHT * left, 4)
                found.append(replace(options, resident=left, resident_layers=kept, max_fetch=fetch))
        return found

    def _try(self, candidates: Sequence[TuneOptions], name: str) -> None:
        if not candidates:
            return
        tried = [
            Alternative(each, probe(self.search, each)) for each in self._progress(candidates, name)
        ]
        paying = [each for each in tried if each.saved > MARGIN]
        best = max(paying, key=lambda each: each.saved, default=None)
        if best is not None:
            adopted = self._adopt(best.options)
            tried = [replace(each, adopted=adopted and each is best) for each in tried]
        self.tried += tried

    def _adopt(self, options: TuneOptions) -> bool:
        """Search the alphas of these settings; whether they are the better ones."""
        before = self.search
        found = Search(
            before.trials, options, alphas=_around(before.best.alpha), others=before.best.alpha
        )
        for task in self._progress(found.tasks, "tuning the better settings"):
            task()
        limit = (1 - MARGIN) * before.best.trial.link_bytes
        better = found.best.trial.link_bytes < limit and found.reached >= before.reached
        if better or (found.reached and not before.reached):
            self.search = found
            return True
        return False


def probe(search: Search, options: TuneOptions) -> float:
    """Share of the link bytes that these settings save at the KL of the best alphas of a search.

    Two trials on every second window, with alphas that the search's own curves propose. What is
    left between the KLs counts as bytes at the exchange rate of the search's single alphas.
    """
    trials, best = search.trials, search.best
    wanted = trials.measure(search.options.config(best.alpha), search.options.storage, every=EVERY)
    propose = _proposer(search, options)
    found: list[Trial] = []
    aim = best.aim
    for _ in range(2):
        trial = trials.measure(options.config(propose(aim)), options.storage, every=EVERY)
        found.append(trial)
        aim *= wanted.kl / max(trial.kl, 1e-12)
    moved = bytes_at(wanted.kl, found, _rate(search, wanted.kl))
    return 1 - moved / max(wanted.link_bytes, 1e-12)


def bytes_at(kl: float, trials: Sequence[Trial], rate: float) -> float:
    """Link bytes at a KL by the nearest trial, where bytes go as KL to the power of ``-rate``.

    Where that is far off, those of a trial below it, which are more; NaN without any.
    """

    def away(trial: Trial) -> float:
        return math.log(max(trial.kl, 1e-12) / max(kl, 1e-12))

    nearest = min(trials, key=lambda each: abs(away(each)))
    if abs(away(nearest)) > FAR:
        return min((each.link_bytes for each in trials if each.kl < kl), default=math.nan)
    return nearest.link_bytes * math.exp(rate * away(nearest))


def _rate(search: Search, kl: float) -> float:
    """How bytes grow as KL falls, by the single alphas around it."""
    low, high = (search.single_at(kl * factor)["link_bytes"] for factor in (1 / NEAR, NEAR))
    return max(0.0, math.log(max(low, 1e-12) / max(high, 1e-12)) / (2 * math.log(NEAR)))


def _proposer(search: Search, options: TuneOptions) -> Callable[[float], tuple[float, ...]]:
    """From a KL to alphas of all layers, by the curves of the layers that still select."""
    kept = options.storage.resident_layers
    rows = [row for row, layer in enumerate(search.layers) if kept == "auto" or layer not in kept]
    curves = search.curves
    left = Curves(curves.alphas, curves.harm[rows], curves.entries[rows])

    def propose(aim: float) -> tuple[float, ...]:
        alpha = list(search.best.alpha)
        for row, value in zip(rows, allocate(left, aim).alphas, strict=True):
            alpha[search.layers[row]] = value
        return tuple(alpha)

    return propose


def _relieving(search: Search) -> list[tuple[int, ...]]:
    """One layer, two, and so on: those without which the others would move the fewest entries."""
    curves, aim = search.curves, search.best.aim
    rows = list(range(len(search.layers)))
    found: list[tuple[int, ...]] = []
    gone: tuple[int, ...] = ()

    def without(row: int) -> float:
        left = [each for each in rows if each != row]
        return allocate(Curves(curves.alphas, curves.harm[left], curves.entries[left]), aim).entries

    while len(found) < MOST_LAYERS and len(rows) > 1:
        row = min(rows, key=without)
        rows.remove(row)
        gone = (*gone, search.layers[row])
        found.append(gone)
    return found


def _around(alphas: Sequence[float]) -> tuple[float, ...]:
    """Of `ALPHAS` those from just below the smallest chosen one to just above the largest."""
    low = int(np.searchsorted(ALPHAS, min(alphas), side="left")) - 1
    high = int(np.searchsorted(ALPHAS, max(alphas), side="right"))
    return ALPHAS[max(0, low) : min(len(ALPHAS), high + 1)]
