"""Trials in which every policy attends to the same share of the cached tokens."""

from __future__ import annotations

from typing import Any

from infinigen_kv_lab.figures.accuracy.definition import EVERYTHING, AccuracySetting
from infinigen_kv_lab.figures.accuracy.scale import Span
from infinigen_kv_lab.figures.accuracy.trial import Trial

TEXT = "wikitext2"


def at_share(
    setting: AccuracySetting, policy: str, share: float, span: Span, *, skewed: bool = True
) -> Trial:
    """Perplexity at a share: InfiniGen's own policies have no threshold then, h2o a budget."""
    if policy == "h2o":
        return setting.reading(TEXT, (policy,), span, budget=share)
    return setting.reading(
        TEXT, (policy,), span, settings=settings_at(policy, share), skewed=skewed
    )


def settings_at(policy: str, share: float) -> dict[str, Any]:
    """Settings of the selection with which InfiniGen's policies attend to just that share."""
    own: dict[str, Any] = {"alpha": EVERYTHING, "max_fetch": share}
    return {"rehearsal": "paper", **own} if policy == "infinigen-paper" else own
