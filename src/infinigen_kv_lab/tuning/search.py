"""The search for the alphas of one model: measure curves, propose, try, correct."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from infinigen_kv.config import is_finite
from infinigen_kv.errors import InputError
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.session.attach import attach
from infinigen_kv_lab.tuning.allocate import Array, Curves, allocate
from infinigen_kv_lab.tuning.harm import HarmMeter
from infinigen_kv_lab.tuning.options import MAX_FETCH, TuneOptions
from infinigen_kv_lab.tuning.trial import Trial, Trials

ALPHAS = (1.0, 2.5, 4.0, 5.0, 6.0, 7.0, 8.5, 11.0)
ROUNDS = 4  # of trying alphas and correcting what the curves promised
CLOSE = 0.95  # share of the target from which on a KL is not worth another round


@dataclass(frozen=True, slots=True)
class Attempt:
    """Alphas of all layers of the model, and what came out on the text that is tuned on.

    ``aim`` is the KL that the curves promised.
    """

    alpha: tuple[float, ...]
    trial: Trial
    aim: float


class Search:
    """Does its work in `tasks`, one after the other; then `best` is there.

    Parameters
    ----------
    trials
        The model, its calibration without tuned settings, and the windows.
    options
        All settings but alpha.
    alphas
        Where curves are measured, increasing; two at least.
    others
        Alphas of all layers, of which those that do not select get theirs; None for the largest
        that is chosen.
    """

    def __init__(
        self,
        trials: Trials,
        options: TuneOptions,
        *,
        alphas: Sequence[float] = ALPHAS,
        others: Sequence[float] | None = None,
    ) -> None:
        self.trials = trials
        self.options = options
        self.layers = _selecting(trials, options)
        self._alphas = tuple(alphas)
        self._others = others
        self._adapter = adapter_for(trials.model)
        self._meter = HarmMeter(
            trials.model,
            self._adapter,
            trials.calibration,
            options.config(),
            self.layers,
            self._alphas,
        )
        self._harms: list[Array] = []
        self.singles: list[Trial] = []
        """One for each of the alphas, which all layers share."""
        self._curves: Curves | None = None
        self._aim = float(options.target_kl)
        self.attempts: list[Attempt] = []

    @property
    def tasks(self) -> list[Callable[[], None]]:
        """What is to be done, in this order."""

        def weigh(place: int) -> Callable[[], None]:
            return lambda: self._harms.append(self._harm(place))

        def try_single(alpha: float) -> Callable[[], None]:
            return lambda: self.singles.append(self._measure(alpha))

        return [
            *(weigh(place) for place in range(len(self.trials.windows))),
            *(try_single(alpha) for alpha in self._alphas),
            *(self._round for _ in range(ROUNDS)),
        ]

    @property
    def best(self) -> Attempt:
        """Of the attempts within the target the one that moves least, else the nearest."""
        within = [each for each in self.attempts if each.trial.kl <= self.options.target_kl]
        if within:
            return min(within, key=lambda each: each.trial.link_bytes)
        return min(self.attempts, key=lambda each: each.trial.kl)

    @property
    def reached(self) -> bool:
        """Whether the target was reached on the text that is tuned on."""
        return self.best.trial.kl <= self.options.target_kl

    @property
    def curves(self) -> Curves:
        """Harms scaled so that their sum at a single alpha is the KL that was measured there."""
        if self._curves is None:
            harm = np.mean(self._harms, axis=0)
            real = np.array([each.kl for each in self.singles])
            entries = [[each.entries.get(i, 0.0) for each in self.singles] for i in self.layers]
            scale = real / np.maximum(harm.sum(0), 1e-12)
            self._curves = Curves(np.array(self._alphas), harm * scale, np.array(entries))
        return self._curves

    def single_at(self, kl: float) -> dict[str, float]:
        """Alpha, link bytes and share that one alpha for all layers needs for this KL.

        Interpolated between those tried, by logarithms.
        """
        order = np.argsort([each.kl for each in self.singles])
        known = np.log([max(self.singles[i].kl, 1e-12) for i in order])

        def at(values: Array) -> float:
            return float(np.interp(np.log(max(kl, 1e-12)), known, values[order]))

        moved = np.log([max(each.link_bytes, 1e-12) for each in self.singles])
        shares = np.array([each.fetched_share for each in self.singles])
        return {
            "alpha": at(np.array(self._alphas)),
            "link_bytes": float(np.exp(at(moved))),
            "fetched_share": at(shares),
        }

    def _round(self) -> None:
        target = self.options.target_kl
        if any(CLOSE * target <= each.trial.kl <= target for each in self.attempts):
            return
        proposed = allocate(self.curves, self._aim)
        chosen = dict(zip(self.layers, proposed.alphas, strict=True))
        alpha = self._for_all_layers(chosen)
        if any(each.alpha == alpha for each in self.attempts):
            return
        trial = self._measure(alpha)
        self.attempts.append(Attempt(alpha, trial, self._aim))
        # a little below, so that the next one ends within the target
        self._aim *= (1 + CLOSE) / 2 * target / max(trial.kl, 1e-12)

    def _measure(self, alpha: float | tuple[float, ...]) -> Trial:
        return self.trials.measure(self.options.config(alpha), self.options.storage)

    def _harm(self, place: int) -> Array:
        """``(layers, alphas)`` of one window."""
        config = {k: v for k, v in asdict(self.options.config()).items() if k != "alpha"}
        known = self.trials.measurement("harm", place, config=config)
        window = self.trials.windows[place]
        names = [f"{alpha:g}" for alpha in self._alphas]

        def measure() -> dict[str, dict[str, float]]:
            found = self._meter.read(window.prompt, window.decoded).tolist()
            return {
                str(layer): dict(zip(names, row, strict=True))
                for layer, row in zip(self.layers, found, strict=True)
            }

        def read(values: Mapping[str, Any]) -> Array:
            # more layers and alphas may have been measured
            rows = [[values[str(layer)][name] for name in names] for layer in self.layers]
            if not all(is_finite(each) for row in rows for each in row):
                raise ValueError("not all are numbers")
            return np.array(rows, dtype=np.float64)

        return self.trials.kept.of(known, measure, read)

    def _for_all_layers(self, chosen: Mapping[int, float]) -> tuple[float, ...]:
        if self._others is None:
            rest = max(chosen.values())
            return tuple(chosen.get(spec.index, rest) for spec in self._adapter.layers)
        return tuple(chosen.get(layer, alpha) for layer, alpha in enumerate(self._others))


def reachable(trials: Trials, options: TuneOptions) -> TuneOptions:
    """The same, with `MAX_FETCH` where what the resident set holds is too little for the target."""
    if options.max_fetch is not None or options.config().max_fetch == MAX_FETCH:
        return options
    _selecting(trials, options)
    least = trials.measure(options.config(ALPHAS[-1]), options.storage).kl
    return options if least <= options.target_kl else replace(options, max_fetch=MAX_FETCH)


def _selecting(trials: Trials, options: TuneOptions) -> list[int]:
    with attach(trials.model, trials.calibration, options.config(), options.storage) as session:
        cache = session.new_cache(tokens=options.prompt_tokens)
        layers = cache.speculated_layers
        cache.close()
    if not layers:
        raise InputError(
            "no layer of this model selects, so there is nothing to tune: all are kept on the "
            "device whole, or have no full attention"
        )
    return layers
