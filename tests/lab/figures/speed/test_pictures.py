"""Every figure drawn from made-up points: legible, and nothing over anything else."""

from __future__ import annotations

import io
from functools import cache

import pytest
from matplotlib.image import imread

import made_up_points as made_up
from infinigen_kv.policies.registry import POLICIES
from infinigen_kv_lab.figures.catalogue import figures_of
from infinigen_kv_lab.figures.drawing import DPI, WIDTH, Canvas, brief
from infinigen_kv_lab.figures.speed.figure import SpeedFigure
from infinigen_kv_lab.figures.speed.peer_results import PeerResults
from infinigen_kv_lab.figures.speed.setting import FULL_SCALE, QUICK_SCALE
from infinigen_kv_lab.figures.styles import STYLES
from legible import check_legible, texts

FIGURES = figures_of("speed")
FOOTER = "smollm2, bfloat16 | a processor with a long name, 64 threads | EMULATED link, 0.146 GB/s"
GUESTS = (
    PeerResults(
        "llama.json",
        "llama.cpp",
        {},
        tuple(
            {"system": "llama.cpp, Q4_1 weights", "context": context, "tokens_per_s": speed}
            for context, speed in ((1, 90.0), (4096, 40.0), (8000, 24.0))
        ),
    ),
    PeerResults(
        "kvpress.json",
        "kvpress",
        {"prompt_sha256": "made up"},
        tuple(
            {
                "system": f"{name} (kvpress)",
                "setting": f"keep {keep}",
                "link_bytes_per_token": keep * made_up.KV * 4096,
                "kl_to_ideal": kl / keep,
            }
            for name, kl in (("SnapKV", 0.05), ("KeyDiff", 0.1), ("ExpectedAttention", 0.07))
            for keep in (0.05, 0.2, 0.4)
        ),
    ),
)


SCALES = {"quick": QUICK_SCALE, "full": FULL_SCALE}
CASES = [(name, size, "alone") for name in FIGURES for size in SCALES]
CASES += [(name, "full", "guests") for name in ("pareto", "memory")]


@cache
def drawn(name: str, size: str, company: str) -> Canvas:
    figure = FIGURES[name]
    guests = GUESTS if company == "guests" else ()
    setting = made_up.setting(SCALES[size], peer_results=guests)
    canvas = Canvas(figure.title, FOOTER)
    figure.draw(canvas, figure.rows(setting, made_up.found(figure, setting)))
    canvas.finish()
    canvas.figure.draw_without_rendering()
    return canvas


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_no_text_lies_over_another_or_outside(case: tuple[str, str, str]) -> None:
    check_legible(drawn(*case))


@pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)
def test_axes_are_named_and_the_link_is_called_emulated(figure: SpeedFigure) -> None:
    canvas = drawn(figure.name, "full", "alone")
    shown = "\n".join(text.get_text() for text in texts(canvas))
    assert "EMULATED" in shown
    assert figure.title in shown.replace("\n", " ") or figure.title in shown
    for axes in canvas.figure.axes:
        labelled = axes.get_ylabel() or axes.get_xlabel()
        assert labelled or axes.get_shared_y_axes().joined(axes, canvas.figure.axes[0])


@pytest.mark.parametrize("name", ["14", "15", "16a", "17", "18"])
def test_the_papers_numbers_are_in_the_picture(name: str) -> None:
    shown = [text.get_text() for text in texts(drawn(name, "full", "alone"))]
    assert any("the paper" in each for each in shown)


def test_size_of_the_file() -> None:
    figure = FIGURES["16b"]
    setting = made_up.setting()
    canvas = Canvas(figure.title, FOOTER)
    figure.draw(canvas, figure.rows(setting, made_up.found(figure, setting)))
    picture = imread(io.BytesIO(canvas.png()), format="png")
    assert picture.shape[1] == WIDTH * DPI == 1600


def test_every_system_has_a_look_of_its_own() -> None:
    assert set(POLICIES) <= set(STYLES)
    canvas = Canvas("title", "footer")
    systems = [*STYLES, "SnapKV", "KeyDiff", "ExpectedAttention", "StreamingLLM", "llama.cpp"]
    looks = {system: tuple(sorted(canvas.style(system).items())) for system in systems}
    looks.pop("oracle, no resident set")  # the oracle once more
    assert len(set(looks.values())) == len(looks)
    assert canvas.style("SnapKV") == canvas.style("SnapKV")


@pytest.mark.parametrize(
    ("value", "words"), [(1234.4, "1234"), (99.96, "100"), (12.345, "12.3"), (0.01234, "0.0123")]
)
def test_numbers_are_brief(value: float, words: str) -> None:
    assert brief(value) == words
