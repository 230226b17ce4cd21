"""What would help a model: settings to change, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infinigen_kv_lab.diagnosis.evidence import Evidence, known_mean
from infinigen_kv_lab.diagnosis.wording import name_layers, percent

WORTH_TRYING = 0.2  # share of the KL that keeping a few layers whole must save to be advised
STRANGE_TEXT = 0.1  # share of the query's power missed here beyond what calibration found
BLURRED = 0.01  # attention mass that the partial dimensions cost
WIDER_ALPHA = 1.0
WIDER_FETCH = 2.0
MORE_DIMENSIONS = 1.35
FULL_ATTENTION = "or attend to everything: the policies stream and ideal work with any model"


def advise(
    evidence: Evidence, weak: Mapping[int, Sequence[str]], *, is_good: bool
) -> tuple[str, ...]:
    """Settings that would help, the surest first.

    Parameters
    ----------
    weak
        Weak layers and what is wrong with them (`verdict.weaknesses`).
    is_good
        Whether the model suits as it is: then only what is cheap or was tried is advised.
    """
    found = [_resident(evidence, weak), _own_text(evidence), _rehearsal(evidence)]
    if not is_good:
        found += [_wider(evidence), _dimensions(evidence), FULL_ATTENTION]
    return tuple(each for each in found if each is not None)


def _resident(evidence: Evidence, weak: Mapping[int, Sequence[str]]) -> str | None:
    """Keep layers on the device: those that were tried, else those that cannot be predicted."""
    trial = evidence.trial
    hard = {layer for layer, kinds in weak.items() if "unpredictable" in kinds}
    if trial is not None and trial.kl_kept <= (1 - WORTH_TRYING) * trial.kl:
        kept = hard | set(trial.layers)
        saved = f"measured: KL {trial.kl:.3g} becomes {trial.kl_kept:.3g} with {_few(trial.layers)}"
    elif hard:
        kept, saved = hard, "they cannot be predicted"
    else:
        return None
    option = ",".join(map(str, sorted({*evidence.full_layers, *kept})))
    cost = len(kept) / (len(evidence.layers) + len(evidence.full_layers))
    return (
        f"keep the KV of {name_layers(kept)} on the device (--resident-layers {option}): "
        f"{saved}; it costs device memory of {percent(cost)} of the cache"
    )


def _few(layers: tuple[int, ...]) -> str:
    return f"{name_layers(layers)} attended to in full"


def _own_text(evidence: Evidence) -> str | None:
    stranger = known_mean(
        [each.unexplained - each.calibration_unexplained for each in evidence.layers]
    )
    if not stranger > STRANGE_TEXT:
        return None
    return (
        f"calibrate on text like yours (infinigen-kv calibrate --text FILE --output DIR, then "
        f"--calibration DIR): on this text the prediction misses {percent(stranger)} more of the "
        "query's power than on the calibration's"
    )


def _rehearsal(evidence: Evidence) -> str | None:
    if evidence.config.rehearsal != "paper":
        return None
    return (
        "use the calibrated rehearsal (--rehearsal calibrated), which fits the query's prediction"
    )


def _wider(evidence: Evidence) -> str:
    """Fetch more: where the cap is what binds, raise it, else alpha."""
    config = evidence.config
    wanted = known_mean([each.wanted for each in evidence.layers])
    if wanted > config.max_fetch:
        wider = min(1.0, WIDER_FETCH * config.max_fetch)
        return (
            f"allow more to be fetched (--max-fetch {wider:g}, now {config.max_fetch:g}): "
            f"{percent(wanted)} of the cache is wanted, and the limit cuts that off"
        )
    if isinstance(config.alpha, tuple):
        return "fetch more: tune for a smaller KL (infinigen-kv tune --target-kl)"
    return (
        f"fetch more with a larger alpha (--alpha {config.alpha + WIDER_ALPHA:g}, now "
        f"{config.alpha:g}), or let infinigen-kv tune choose one for each layer"
    )


def _dimensions(evidence: Evidence) -> str | None:
    layers, config = evidence.layers, evidence.config
    lost = known_mean([each.best_coverage - each.coverage_true_query for each in layers])
    if config.index_bits is not None:
        return None
    wider = min(1.0, round(MORE_DIMENSIONS * config.partial_ratio, 2))
    if not lost > BLURRED or wider <= config.partial_ratio:
        return None
    return (
        f"rehearse in more dimensions (--partial-ratio {wider:g}, now {config.partial_ratio:g}): "
        f"the partial ones cost {percent(lost)} of the attention mass, and need more device memory"
    )
