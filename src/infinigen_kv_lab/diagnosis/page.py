"""The diagnosis as one HTML page: nothing is fetched from elsewhere, and no script runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infinigen_kv_lab.diagnosis.charts import Series, chart, heat_map
from infinigen_kv_lab.diagnosis.evidence import LayerEvidence
from infinigen_kv_lab.diagnosis.measure import Diagnosis
from infinigen_kv_lab.diagnosis.wording import percent
from infinigen_kv_lab.figures.drawing import require_matplotlib
from infinigen_kv_lab.figures.page import require_jinja2
from infinigen_kv_lab.figures.styles import BLACK, BLUE, GREEN, ORANGE, RED

if TYPE_CHECKING:
    from markupsafe import Markup

TEMPLATE = Path(__file__).with_name("page.html")
GREY = "#999999"
DARKEST = 0.5  # attention mass lost by a head that is drawn darkest
COLOURS = {"suitable": "good", "suitable with care": "care", "unsuitable": "bad"}


def require_packages() -> None:
    """Raise `InputError` where what the page needs is missing, before work is done for it."""
    require_jinja2()
    require_matplotlib()


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
        If jinja2 or matplotlib is missing.
    """
    require_packages()
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


@dataclass(frozen=True, slots=True)
class Chart:
    """What the template needs of one chart."""

    title: str
    about: str
    legend: tuple[tuple[str, str], ...]
    """Colours and labels."""
    svg: Markup


def _charts(diagnosis: Diagnosis) -> list[Chart]:
    from markupsafe import Markup

    layers = _count(diagnosis)

    def values(read: Callable[[LayerEvidence], float]) -> dict[int, float]:
        return {each.layer: read(each) for each in diagnosis.layers}

    def drawn(
        title: str,
        about: str,
        *series: Series,
        write: Callable[[float], str] = percent,
        top: float | None = None,
    ) -> Chart:
        svg = chart(series, write, layers=layers, name=f"{title}, by layer", top=top)
        return Chart(title, about, tuple((each.color, each.label) for each in series), Markup(svg))

    return [
        drawn(
            "What a layer's selection costs",
            "KL(full || selected) of the next token where this layer alone selects, in nats.",
            Series("KL", "bar", RED, values(lambda each: each.harm)),
            write=lambda value: f"{value:.2g}",
        ),
        drawn(
            "Attention mass on the chosen tokens",
            "The bar is what the chosen tokens carry, the line what as many tokens could, were "
            "they chosen by the true scores. What lacks between bar and line is the rehearsal's "
            "error; what lacks above the line is what any choice of so few tokens leaves out.",
            Series("chosen", "bar", BLUE, values(lambda each: each.coverage)),
            Series("best choice", "mark", GREEN, values(lambda each: each.best_coverage)),
            top=1.0,
        ),
        drawn(
            "Recall of the tokens that matter",
            "Of the tokens chosen beyond the always-kept ones, the share that the true scores "
            "would have chosen. With the true query only the error of the partial dimensions is "
            "left, with all dimensions only that of the prediction.",
            Series("true query", "mark", ORANGE, values(lambda each: each.recall_true_query)),
            Series(
                "all dimensions", "mark", GREEN, values(lambda each: each.recall_all_dimensions)
            ),
            Series("engine", "dot", BLUE, values(lambda each: each.recall)),
            top=1.0,
        ),
        drawn(
            "Query that the prediction misses",
            "Share of the query's power. The line is the layer's own weights on the previous "
            "layer's input (the paper's way), the bar is what is used. The dot says how alike the "
            "two layers' inputs are (cosine).",
            Series("missed", "bar", ORANGE, values(lambda each: each.unexplained)),
            Series("own weights", "mark", BLACK, values(lambda each: each.own_weights)),
            Series("input similarity", "dot", BLUE, values(lambda each: each.similarity)),
            top=1.0,
        ),
        drawn(
            "How concentrated attention is",
            "The bar is the share of the context that carries 0.9 of the attention mass, the line "
            "the share that is fetched.",
            Series("carries 0.9 of the mass", "bar", GREY, values(lambda e: e.concentration)),
            Series("fetched", "mark", BLUE, values(lambda each: each.fetched)),
        ),
    ]


def _heads(diagnosis: Diagnosis) -> Markup:
    from markupsafe import Markup

    table = {each.layer: [1 - value for value in each.head_coverage] for each in diagnosis.layers}
    what = "attention mass left out"
    name = f"{what.capitalize()}, by layer and head"
    layers = _count(diagnosis)
    return Markup(heat_map(table, percent, layers=layers, what=what, darkest=DARKEST, name=name))


def _count(diagnosis: Diagnosis) -> int:
    """Layers of the model."""
    return len(diagnosis.layers) + len(diagnosis.unselected)
