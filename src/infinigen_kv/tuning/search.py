"""The search for the alphas of one model: measure curves, propose, try, correct."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from infinigen_kv.adapters import adapter_for
from infinigen_kv.calibration import Calibration
from infinigen_kv.diagnosis import Evidence, LayerEvidence
from infinigen_kv.errors import InputError
from infinigen_kv.session import attach
from infinigen_kv.tuning.allocate import Array, Curves, allocate
from infinigen_kv.tuning.harm import HarmMeter
from infinigen_kv.tuning.options import TuneOptions
from infinigen_kv.tuning.trial import Trial, Trials
from infinigen_kv.tuning.windows import Window

ALPHAS = (1.0, 2.5, 4.0, 5.0, 6.0, 7.0, 8.5, 11.0)
ROUNDS = 4  # of trying alphas and correcting what the curves promised
UNKNOWN = {"unexplained": float("nan")}
CLOSE = 0.95  # share of the target from which on a KL is not worth another round


@dataclass(frozen=True, slots=True)
class Attempt:
    """Alphas of all layers of the model, and what came out on the text that is tuned on."""

    alpha: tuple[float, ...]
    trial: Trial


class Search:
    """Does its work in `tasks`, one after the other; then `best` is there.

    Parameters
    ----------
    model, calibration
        The model, not attached, and its calibration without tuned settings.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        calibration: Calibration,
        options: TuneOptions,
        windows: Sequence[Window],
    ) -> None:
        self._options = options
        self._windows = windows
        self._adapter = adapter_for(model)
        self._trials = Trials(model, calibration, windows, options.storage)
        self.layers = _selecting(model, calibration, options)
        self._meter = HarmMeter(
            model, self._adapter, calibration, options.config(), self.layers, ALPHAS
        )
        self.singles: list[Trial] = []
        """One for each of `ALPHAS`, which all layers share."""
        self._curves: Curves | None = None
        self._aim = float(options.target_kl)
        self.attempts: list[Attempt] = []

    @property
    def tasks(self) -> list[Callable[[], None]]:
        """What is to be done, in this order."""

        def weigh(window: Window) -> Callable[[], None]:
            return lambda: self._meter.read(window.prompt, window.decoded)

        def try_single(alpha: float) -> Callable[[], None]:
            config = self._options.config(alpha)
            return lambda: self.singles.append(self._trials.measure(config))

        return [
            *(weigh(window) for window in self._windows),
            *(try_single(alpha) for alpha in ALPHAS),
            *(self._round for _ in range(ROUNDS)),
        ]

    @property
    def best(self) -> Attempt:
        """Of the attempts within the target the one that moves least, else the nearest."""
        within = [each for each in self.attempts if each.trial.kl <= self._options.target_kl]
        if within:
            return min(within, key=lambda each: each.trial.link_bytes)
        return min(self.attempts, key=lambda each: each.trial.kl)

    @property
    def reached(self) -> bool:
        """Whether the target was reached on the text that is tuned on."""
        return self.best.trial.kl <= self._options.target_kl

    @property
    def curves(self) -> Curves:
        """Harms scaled so that their sum at a single alpha is the KL that was measured there."""
        if self._curves is None:
            harm = self._meter.harm.numpy()
            real = np.array([each.kl for each in self.singles])
            entries = [[each.entries.get(i, 0.0) for each in self.singles] for i in self.layers]
            scale = real / np.maximum(harm.sum(0), 1e-12)
            self._curves = Curves(np.array(ALPHAS), harm * scale, np.array(entries))
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
            "alpha": at(np.array(ALPHAS)),
            "link_bytes": float(np.exp(at(moved))),
            "fetched_share": at(shares),
        }

    def _round(self) -> None:
        target = self._options.target_kl
        if any(CLOSE * target <= each.trial.kl <= target for each in self.attempts):
            return
        proposed = allocate(self.curves, self._aim)
        alpha = self._for_all_layers(dict(zip(self.layers, proposed.alphas, strict=True)))
        if any(each.alpha == alpha for each in self.attempts):
            return
        trial = self._trials.measure(self._options.config(alpha))
        self.attempts.append(Attempt(alpha, trial))
        # a little below, so that the next one ends within the target
        self._aim *= (1 + CLOSE) / 2 * target / max(trial.kl, 1e-12)

    def _for_all_layers(self, chosen: Mapping[int, float]) -> tuple[float, ...]:
        """With the largest for layers that do not select; they have no use for it."""
        rest = max(chosen.values())
        return tuple(chosen.get(spec.index, rest) for spec in self._adapter.layers)


def _selecting(model: PreTrainedModel, calibration: Calibration, options: TuneOptions) -> list[int]:
    with attach(model, calibration, options.config(), options.storage) as session:
        cache = session.new_cache(tokens=options.prompt_tokens)
        layers = cache.speculated_layers
        cache.close()
    if not layers:
        raise InputError(
            "no layer of this model selects, so there is nothing to tune: all are kept on the "
            "device whole, or have no full attention"
        )
    return layers


def report(search: Search, checked: Trial) -> dict[str, Any]:
    """What was found, for people and JSON; ``checked`` is `Search.best` on text held back."""
    best, single = search.best.trial, search.single_at(search.best.trial.kl)
    return {
        "reached": search.reached,
        "kl": checked.kl,
        "link_bytes": checked.link_bytes,
        "fetched_share": checked.fetched_share,
        "kl_tuned_on": best.kl,
        "link_bytes_tuned_on": best.link_bytes,
        "single_alpha": single,
        "bytes_saved": 1 - best.link_bytes / max(single["link_bytes"], 1e-12),
        "layers": search.layers,
        "least_kl": min(each.kl for each in search.singles),
    }


def evidence(calibration: Calibration) -> Evidence:
    """What tuning found out about the model, for `diagnosis.judge`."""
    tuned = calibration.tuned
    assert tuned is not None
    layers = [
        LayerEvidence(layer, unexplained=calibration.report.get(str(layer), UNKNOWN)["unexplained"])
        for layer in tuned.measured["layers"]
    ]
    return Evidence(
        calibration.config(),
        tuple(layers),
        kl=tuned.measured["kl"],
        fetched=tuned.measured["fetched_share"],
    )
