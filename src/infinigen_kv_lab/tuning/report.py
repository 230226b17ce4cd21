"""What tuning found, for people and JSON."""

from __future__ import annotations

from typing import Any

from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv_lab.diagnosis import Evidence, LayerEvidence
from infinigen_kv_lab.tuning.alternatives import Alternative
from infinigen_kv_lab.tuning.search import Search
from infinigen_kv_lab.tuning.trial import Trial

UNKNOWN = {"unexplained": float("nan")}


def report(
    given: Search, found: Search, checked: dict[Search, Trial], tried: list[Alternative]
) -> dict[str, Any]:
    """What it costs.

    Parameters
    ----------
    given
        The search with all settings but alpha as they were given.
    found
        The one whose settings are taken; the same where no others paid.
    checked
        The best alphas of both on text held back.
    tried
        Other settings.
    """
    best, held = found.best.trial, checked[found]
    single = given.single_at(best.kl)
    return {
        "reached": found.reached,
        "kl": held.kl,
        "link_bytes": held.link_bytes,
        "fetched_share": held.fetched_share,
        "kl_tuned_on": best.kl,
        "link_bytes_tuned_on": best.link_bytes,
        "single_alpha": single,
        "bytes_saved": 1 - best.link_bytes / max(single["link_bytes"], 1e-12),
        "layers": found.layers,
        "least_kl": min(each.kl for each in [*given.singles, *found.singles]),
        "resident": found.options.resident_share,
        "alternatives": [each.to_dict() for each in tried],
        "alpha_only": {
            "kl": checked[given].kl,
            "link_bytes": checked[given].link_bytes,
            "kl_tuned_on": given.best.trial.kl,
            "link_bytes_tuned_on": given.best.trial.link_bytes,
        },
    }


def evidence(calibration: Calibration) -> Evidence:
    """What tuning found out about the model, for `infinigen_kv_lab.diagnosis.judge`."""
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
