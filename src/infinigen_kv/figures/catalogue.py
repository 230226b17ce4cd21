"""All figures, by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from infinigen_kv.errors import InputError
from infinigen_kv.figures.batches import Batches
from infinigen_kv.figures.definition import Figure
from infinigen_kv.figures.latency import Latency
from infinigen_kv.figures.lengths import Lengths
from infinigen_kv.figures.link_rates import LinkRates
from infinigen_kv.figures.one_memory import OneMemory
from infinigen_kv.figures.pareto import Pareto
from infinigen_kv.figures.resident_sets import ResidentSets
from infinigen_kv.figures.sensitivity import Sensitivity
from infinigen_kv.figures.sizes import Sizes
from infinigen_kv.figures.split import Split

FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        figure.name: figure
        for figure in (
            Latency(),
            Batches(),
            Lengths(),
            Sizes(),
            Sensitivity(),
            Split(),
            LinkRates(),
            ResidentSets(),
            Pareto(),
            OneMemory(),
        )
    }
)
"""The paper's by their numbers, then those beyond it; in the order of the page."""

GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType({"16": ("16a", "16b")})


def choose_figures(text: str | None) -> list[Figure]:
    """What ``--figures 14,16`` names; all of them for None.

    Raises
    ------
    InputError
        A name is unknown; lists those that there are.
    """
    if text is None:
        return list(FIGURES.values())
    asked = [part.strip().lower() for part in text.split(",") if part.strip()]
    chosen: set[str] = set()
    for name in asked:
        if name not in FIGURES and name not in GROUPS:
            near = difflib.get_close_matches(name, FIGURES, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InputError(
                f"--figures {name!r} is not valid: {hint}there are {', '.join(FIGURES)}"
            )
        chosen.update(GROUPS.get(name, (name,)))
    if not chosen:
        raise InputError(f"--figures {text!r} names none: there are {', '.join(FIGURES)}")
    return [figure for name, figure in FIGURES.items() if name in chosen]
