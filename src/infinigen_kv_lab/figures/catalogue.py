"""All figures, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from infinigen_kv_lab.figures.batches import Batches
from infinigen_kv_lab.figures.definition import Figure
from infinigen_kv_lab.figures.latency import Latency
from infinigen_kv_lab.figures.lengths import Lengths
from infinigen_kv_lab.figures.link_rates import LinkRates
from infinigen_kv_lab.figures.one_memory import OneMemory
from infinigen_kv_lab.figures.pareto import Pareto
from infinigen_kv_lab.figures.resident_sets import ResidentSets
from infinigen_kv_lab.figures.sensitivity import Sensitivity
from infinigen_kv_lab.figures.sheets import choose
from infinigen_kv_lab.figures.sizes import Sizes
from infinigen_kv_lab.figures.split import Split

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
    return choose(text, FIGURES, GROUPS)
