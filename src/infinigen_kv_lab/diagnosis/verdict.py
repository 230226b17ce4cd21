"""Whether InfiniGen suits a model: the thresholds, and the reasons in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from infinigen_kv.storage.config import HARD_TO_PREDICT
from infinigen_kv_lab.diagnosis.advice import advise
from infinigen_kv_lab.diagnosis.evidence import Evidence, LayerEvidence, known_mean
from infinigen_kv_lab.diagnosis.wording import name_layers, percent, span

Level = Literal["suitable", "suitable with care", "unsuitable"]
Weakness = Literal["unpredictable", "flat", "misled", "lossy"]
Weak = Mapping[int, tuple[Weakness, ...]]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Where figures stop being good.

    Of the pairs, above the first a model suits with care only, above the second it does not suit.
    The others say when a layer is weak.

    Attributes
    ----------
    kl
        KL(full || selected), nats per token. On SmolLM2-135M nine of ten most likely tokens stay
        the same at 0.02 and three of four at 0.25 (docs/results).
    fetched
        Share of the cache that steps attend to. A quarter still moves four times fewer bytes than
        full attention; more than half is hardly worth a rehearsal.
    wanted
        The same without ``max_fetch``: where it is large, scores do not tell tokens apart.
    lost
        Attention mass that is not attended to, mean over the layers; no second value, since KL
        says what it costs.
    weak_layers
        Share of the layers that are weak; no second value either.
    unexplained
        Of a layer's query, the share of the power that the prediction misses; what the engine's
        ``resident_layers="auto"`` goes by.
    similarity
        Below it, an unpredictable layer is explained by what its predecessor reads.
    concentration
        Share of the context that carries 0.9 of a layer's attention mass: flat above it.
    missed
        Mass that a better choice of as many tokens would add.
    layer_lost
        Mass that a layer loses.
    """

    kl: tuple[float, float] = (0.05, 0.25)
    fetched: tuple[float, float] = (0.25, 0.5)
    wanted: tuple[float, float] = (0.25, 0.5)
    lost: float = 0.2
    weak_layers: float = 0.25
    unexplained: float = HARD_TO_PREDICT
    similarity: float = 0.5
    concentration: float = 0.25
    missed: float = 0.06
    layer_lost: float = 0.25


@dataclass(frozen=True, slots=True)
class Verdict:
    """The level, the reasons for it (the figures that decide come first), and what would help.

    ``weak`` names the layers that fall short, and how.
    """

    level: Level
    reasons: tuple[str, ...]
    advice: tuple[str, ...]
    weak: Weak


def judge(evidence: Evidence, thresholds: Thresholds | None = None) -> Verdict:
    """Judge a model by what was measured; figures that are NaN decide nothing.

    Examples
    --------
    >>> layers = (LayerEvidence(1, coverage=0.92, best_coverage=0.94),)
    >>> judge(Evidence(InfiniGenConfig(), layers, kl=0.02, fetched=0.09)).level
    'suitable'
    """
    limits = thresholds or Thresholds()
    found = {each.layer: weaknesses(each, limits) for each in evidence.layers}
    weak = {layer: kinds for layer, kinds in found.items() if kinds}
    grades: list[int] = []
    reasons: list[str] = []
    for grade, reason in _whole(evidence, weak, limits):
        grades.append(grade)
        reasons.append(reason)
    reasons += [*_sources(evidence), *_by_weakness(evidence.layers, weak, limits)]
    levels: tuple[Level, ...] = ("suitable", "suitable with care", "unsuitable")
    level = levels[max(grades, default=0)]
    advice = advise(evidence, weak, is_good=level == "suitable")
    return Verdict(level, tuple(reasons), advice, weak)


def weaknesses(layer: LayerEvidence, limits: Thresholds) -> tuple[Weakness, ...]:
    """What is wrong with a layer: its causes, or, where there is none, the effect."""
    causes: list[Weakness] = []
    if layer.unexplained > limits.unexplained:
        causes.append("unpredictable")
    if layer.concentration > limits.concentration:
        causes.append("flat")
    if causes:
        return tuple(causes)
    if layer.missed > limits.missed:
        return ("misled",)
    return ("lossy",) if layer.lost > limits.layer_lost else ()


def _whole(evidence: Evidence, weak: Weak, limits: Thresholds) -> list[tuple[int, str]]:
    """Grades from 0 (good) to 2, and what they say; those that are known only, worst first."""
    layers = evidence.layers
    wanted = known_mean([each.wanted for each in layers])
    lost = known_mean([each.lost for each in layers])
    share = len(weak) / len(layers) if layers else math.nan
    graded = [
        (
            _grade(evidence.kl, limits.kl),
            f"the next-token distribution changes by {evidence.kl:.3g} nats a token "
            f"(KL; good up to {limits.kl[0]:g}, too much above {limits.kl[1]:g})",
        ),
        (
            _grade(evidence.fetched, limits.fetched),
            f"{percent(evidence.fetched)} of the cache is fetched "
            f"(good up to {percent(limits.fetched[0])}, too much above "
            f"{percent(limits.fetched[1])})",
        ),
    ]
    known = [each for each in graded if each[0] >= 0]
    extra = [
        (
            _grade(wanted, limits.wanted),
            f"without max_fetch {percent(wanted)} of the cache would be wanted (good up to "
            f"{percent(limits.wanted[0])}, too much above {percent(limits.wanted[1])}): the "
            "scores hardly tell the tokens apart",
        ),
        (
            _grade(lost, (limits.lost, math.inf)),
            f"{percent(lost)} of the attention mass is left out, on average over the layers "
            f"(good up to {percent(limits.lost)})",
        ),
        (
            _grade(share, (limits.weak_layers, math.inf)),
            f"{len(weak)} of {len(layers)} layers that select are weak "
            f"(good up to {percent(limits.weak_layers)})",
        ),
    ]
    return sorted(
        known + [each for each in extra if each[0] > 0], key=lambda each: each[0], reverse=True
    )


def _sources(evidence: Evidence) -> list[str]:
    """Where the change of the distribution comes from, as far as that was measured."""
    found = []
    if not math.isnan(evidence.kl + evidence.best_kl):
        is_few = evidence.best_kl > evidence.kl / 2
        cause = "small number of tokens" if is_few else "rehearsal's errors"
        found.append(
            f"the best choice of as many tokens would change it by {evidence.best_kl:.3g}, so most "
            f"of that comes from the {cause}"
        )
    trial = evidence.trial
    if trial is not None:
        found.append(
            f"{name_layers(trial.layers)} {'harms' if len(trial.layers) == 1 else 'harm'} most: "
            f"attended to in full, KL goes from {trial.kl:.3g} to {trial.kl_kept:.3g} (on a part "
            "of the text)"
        )
    return found


def _grade(value: float, limits: tuple[float, float]) -> int:
    """0, 1 or 2 by the limits that the value exceeds; -1 for NaN."""
    if math.isnan(value):
        return -1
    return sum(value > limit for limit in limits)


def _by_weakness(layers: Iterable[LayerEvidence], weak: Weak, limits: Thresholds) -> list[str]:
    """One sentence for each kind of weakness, with the layers and their figures."""
    describe: dict[Weakness, Callable[[list[LayerEvidence]], str]] = {
        "unpredictable": lambda group: _unpredictable(group, limits),
        "flat": _flat,
        "misled": _misled,
        "lossy": _lossy,
    }
    sentences = []
    for kind, words in describe.items():
        group = [each for each in layers if kind in weak.get(each.layer, ())]
        if group:
            sentences.append(f"{name_layers(each.layer for each in group)}: {words(group)}")
    return sentences


def _unpredictable(group: list[LayerEvidence], limits: Thresholds) -> str:
    missed = span((each.unexplained for each in group), percent)
    figures = f"{missed} of the query's power missed"
    similarity = [each.similarity for each in group]
    if not known_mean(similarity) < limits.similarity:
        return f"the query is hard to predict ({figures})"
    return (
        "the previous layer's input says little about the query (similarity "
        f"{span(similarity, '{:.2f}'.format)}, {figures})"
    )


def _flat(group: list[LayerEvidence]) -> str:
    shares = span((each.concentration for each in group), percent)
    return f"flat attention: {shares} of the tokens carry 0.9 of the mass, so as many are needed"


def _misled(group: list[LayerEvidence]) -> str:
    missed = span((each.missed for each in group), percent)
    return (
        f"the rehearsal picks the wrong tokens: as many of the right ones would carry {missed} "
        f"more of the mass ({main_source(group)})"
    )


def main_source(group: list[LayerEvidence]) -> str:
    """Which of the two sources of error costs more attention mass."""
    dimensions = known_mean([each.best_coverage - each.coverage_true_query for each in group])
    prediction = known_mean([each.best_coverage - each.coverage_all_dimensions for each in group])
    if math.isnan(dimensions) or math.isnan(prediction):
        return "the source of the error was not measured"
    if dimensions > prediction:
        return "mostly the error of the partial dimensions"
    return "mostly the error of the predicted query"


def _lossy(group: list[LayerEvidence]) -> str:
    lost = span((each.lost for each in group), percent)
    return f"too few tokens are fetched: {lost} of the mass is left out, and no choice saves it"
