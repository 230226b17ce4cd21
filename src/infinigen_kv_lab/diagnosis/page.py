"""The diagnosis as one HTML page: nothing is fetched from elsewhere, and no script runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infinigen_kv.errors import InputError
from infinigen_kv_lab.diagnosis.charts import Chart, HeatMap, Series, draw, heat_map
from infinigen_kv_lab.diagnosis.evidence import LayerEvidence
from infinigen_kv_lab.diagnosis.measure import Diagnosis
from infinigen_kv_lab.diagnosis.wording import percent

TEMPLATE = Path(__file__).with_name("page.html")
DARKEST = 0.5  # attention mass lost by a head that is drawn darkest
COLOURS = {"suitable": "good", "suitable with care": "care", "unsuitable": "bad"}


def require_jinja2() -> None:
    """Raise `InputError` where jinja2 is missing, before work is done for a page."""
    if importlib.util.find_spec("jinja2") is None:
        raise InputError("the page needs jinja2: pip install 'infinigen-kv[plot]'")


def render_page(diagnosis: Diagnosis, *, title: str, command: str, facts: Mapping[str, str]) -> str:
    """The page; all text in it is escaped.

    Parameters
    ----------
    command
        What was typed.
    facts
        Model, text and settings, by name.

    Raises
    ------
    InputError
        If jinja2 is missing.
    """
    require_jinja2()
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["percent"] = percent
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    verdict = diagnosis.verdict
    return template.render(
        title=title,
        command=command,
        facts=facts,
        verdict=verdict,
        colour=COLOURS[verdict.level],
        policies=diagnosis.policies,
        charts=_charts(diagnosis),
        heads=_heads(diagnosis),
        layers=diagnosis.layers,
        unselected=diagnosis.unselected,
    )


def _charts(diagnosis: Diagnosis) -> list[Chart]:
    count = _count(diagnosis)

    def values(read: Callable[[LayerEvidence], float]) -> dict[int, float]:
        return {each.layer: read(each) for each in diagnosis.layers}

    def chart(title: str, about: str, *series: Series, **options: Any) -> Chart:
        return draw(title, about, series, layers=count, **{"write": percent, **options})

    return [
        chart(
            "What a layer's selection costs",
            "KL(full || selected) of the next token where this layer alone selects, in nats.",
            Series("KL", "bar", "red", values(lambda each: each.harm)),
            write=lambda value: f"{value:.2g}",
        ),
        chart(
            "Attention mass on the chosen tokens",
            "The bar is what the chosen tokens carry, the line what as many tokens could, were "
            "they chosen by the true scores. What lacks between bar and line is the rehearsal's "
            "error; what lacks above the line is what any choice of so few tokens leaves out.",
            Series("chosen", "bar", "blue", values(lambda each: each.coverage)),
            Series("best choice", "mark", "green", values(lambda each: each.best_coverage)),
            top=1.0,
        ),
        chart(
            "Recall of the tokens that matter",
            "Of the tokens chosen beyond the always-kept ones, the share that the true scores "
            "would have chosen. With the true query only the error of the partial dimensions is "
            "left, with all dimensions only that of the prediction.",
            Series("true query", "mark", "orange", values(lambda each: each.recall_true_query)),
            Series(
                "all dimensions", "mark", "green", values(lambda each: each.recall_all_dimensions)
            ),
            Series("engine", "dot", "blue", values(lambda each: each.recall)),
            top=1.0,
        ),
        chart(
            "Query that the prediction misses",
            "Share of the query's power. The line is the layer's own weights on the previous "
            "layer's input (the paper's way), the bar is what is used. The dot says how alike the "
            "two layers' inputs are (cosine).",
            Series("missed", "bar", "orange", values(lambda each: each.unexplained)),
            Series("own weights", "mark", "black", values(lambda each: each.own_weights)),
            Series("input similarity", "dot", "blue", values(lambda each: each.similarity)),
            top=1.0,
        ),
        chart(
            "How concentrated attention is",
            "The bar is the share of the context that carries 0.9 of the attention mass, the line "
            "the share that is fetched.",
            Series("carries 0.9 of the mass", "bar", "grey", values(lambda e: e.concentration)),
            Series("fetched", "mark", "blue", values(lambda each: each.fetched)),
        ),
    ]


def _heads(diagnosis: Diagnosis) -> HeatMap:
    table = {each.layer: [1 - value for value in each.head_coverage] for each in diagnosis.layers}
    return heat_map(
        table, percent, layers=_count(diagnosis), what="attention mass left out", darkest=DARKEST
    )


def _count(diagnosis: Diagnosis) -> int:
    """Layers of the model."""
    return len(diagnosis.layers) + len(diagnosis.unselected)
