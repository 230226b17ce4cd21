"""All accuracy figures, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from infinigen_kv_lab.figures.accuracy.attention_course import AttentionCourse
from infinigen_kv_lab.figures.accuracy.capacities import Capacities
from infinigen_kv_lab.figures.accuracy.chunks import Chunks
from infinigen_kv_lab.figures.accuracy.codecs import Codecs
from infinigen_kv_lab.figures.accuracy.columns import Columns
from infinigen_kv_lab.figures.accuracy.definition import AccuracyFigure
from infinigen_kv_lab.figures.accuracy.few_shot import FewShot
from infinigen_kv_lab.figures.accuracy.fidelity import Fidelity
from infinigen_kv_lab.figures.accuracy.relative_size import RelativeSize
from infinigen_kv_lab.figures.accuracy.retrieval import Needles, Passkey
from infinigen_kv_lab.figures.accuracy.similarity import SimilarityTable
from infinigen_kv_lab.figures.accuracy.skew import SkewAblation
from infinigen_kv_lab.figures.accuracy.sparse_queries import SparseQueries
from infinigen_kv_lab.figures.accuracy.tokens_needed import TokensNeeded
from infinigen_kv_lab.figures.sheets import choose

ACCURACY_FIGURES: Mapping[str, AccuracyFigure] = MappingProxyType(
    {
        figure.name: figure
        for figure in (
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
    }
)
"""The paper's in its order, then those beyond it; in the order of the page."""

GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType({})


def choose_accuracy_figures(text: str | None) -> list[AccuracyFigure]:
    """What ``--figures 12,table-1`` names; all of them for None.

    Raises
    ------
    InputError
        A name is unknown; lists those that there are.
    """
    return choose(text, ACCURACY_FIGURES, GROUPS)
