"""All figures, by set and name."""

from __future__ import annotations

import difflib

from infinigen_kv.errors import InputError
from infinigen_kv_lab.figures.accuracy.attention_course import AttentionCourse
from infinigen_kv_lab.figures.accuracy.capacities import Capacities
from infinigen_kv_lab.figures.accuracy.chunks import Chunks
from infinigen_kv_lab.figures.accuracy.codecs import Codecs
from infinigen_kv_lab.figures.accuracy.columns import Columns
from infinigen_kv_lab.figures.accuracy.few_shot import FewShot
from infinigen_kv_lab.figures.accuracy.fidelity import Fidelity
from infinigen_kv_lab.figures.accuracy.relative_size import RelativeSize
from infinigen_kv_lab.figures.accuracy.retrieval import Needles, Passkey
from infinigen_kv_lab.figures.accuracy.similarity import SimilarityTable
from infinigen_kv_lab.figures.accuracy.skew import SkewAblation
from infinigen_kv_lab.figures.accuracy.sparse_queries import SparseQueries
from infinigen_kv_lab.figures.accuracy.tokens_needed import TokensNeeded
from infinigen_kv_lab.figures.figure import AnyFigure
from infinigen_kv_lab.figures.speed.batches import Batches
from infinigen_kv_lab.figures.speed.latency import Latency
from infinigen_kv_lab.figures.speed.lengths import Lengths
from infinigen_kv_lab.figures.speed.link_rates import LinkRates
from infinigen_kv_lab.figures.speed.one_memory import OneMemory
from infinigen_kv_lab.figures.speed.pareto import Pareto
from infinigen_kv_lab.figures.speed.resident_sets import ResidentSets
from infinigen_kv_lab.figures.speed.sensitivity import Sensitivity
from infinigen_kv_lab.figures.speed.sizes import Sizes
from infinigen_kv_lab.figures.speed.split import Split

FIGURES: tuple[AnyFigure, ...] = (
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
    SimilarityTable(),
    AttentionCourse(),
    TokensNeeded(),
    Columns(),
    FewShot(),
    Chunks(),
    SkewAblation(),
    Capacities(),
    RelativeSize(),
    SparseQueries(),
    Passkey(),
    Needles(),
    Fidelity(),
    Codecs(),
)
"""Of each set the paper's in its order, then those beyond it; in the order of the page."""

GROUPS = {"16": ("16a", "16b")}
"""Names that stand for several figures."""


def figures_of(figure_set: str) -> dict[str, AnyFigure]:
    """The figures of a set (``speed``, ``accuracy``) by name."""
    return {figure.name: figure for figure in FIGURES if figure.figure_set == figure_set}


def choose_figures(figure_set: str, text: str | None) -> list[AnyFigure]:
    """What ``--figures 14,16`` names, in the order of the page; the whole set for None.

    Raises
    ------
    InputError
        A name is unknown; lists those that there are.
    """
    known = figures_of(figure_set)
    if text is None:
        return list(known.values())
    chosen: set[str] = set()
    for name in [part.strip().lower() for part in text.split(",") if part.strip()]:
        names = GROUPS.get(name, (name,))
        if not known.keys() >= set(names):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InputError(f"--figures {name!r} is not valid: {hint}there are {', '.join(known)}")
        chosen.update(names)
    if not chosen:
        raise InputError(f"--figures {text!r} names none: there are {', '.join(known)}")
    return [figure for name, figure in known.items() if name in chosen]
