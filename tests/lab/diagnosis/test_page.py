"""The page: well formed, whole, nothing from elsewhere, no text taken for markup."""

from __future__ import annotations

import importlib.util
import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from infinigen_kv import InfiniGenConfig
from infinigen_kv.errors import InputError
from infinigen_kv_lab.diagnosis import Diagnosis, Evidence, LayerEvidence, judge
from infinigen_kv_lab.diagnosis.measure import PolicyFigures
from infinigen_kv_lab.diagnosis.page import render_page, require_packages
from infinigen_kv_lab.kit.intervals import Estimate

NASTY = '<script>alert(1)</script> & "it\'s"'
VOID = ("<meta", "<br", "<img", "<link")


def made_up(count: int = 6) -> Diagnosis:
    layers = tuple(
        LayerEvidence(
            layer=index,
            similarity=0.03 if index == 1 else 0.8,
            unexplained=0.6 if index == 1 else 0.1,
            own_weights=1.3 if index == 1 else 0.3,
            recall=0.7,
            recall_true_query=0.75,
            recall_all_dimensions=math.nan,
            coverage=0.9,
            best_coverage=0.95,
            concentration=0.1,
            fetched=0.09,
            wanted=0.11,
            harm=0.001 * index,
            head_coverage=(0.95, 0.85, 0.9),
        )
        for index in range(1, count)
    )
    evidence = Evidence(InfiniGenConfig(), layers, kl=0.03, fetched=0.09)
    kl = Estimate(0.03, 0.02, 0.04)
    single = Estimate(0.5, math.nan, math.nan)
    return Diagnosis(
        evidence=evidence,
        verdict=judge(evidence),
        unselected={0: "first layer: no predecessor to rehearse from"},
        policies={
            "infinigen": PolicyFigures(kl, 0.93, Estimate(1.01, 1.0, 1.02), 0.09, 0.12),
            "infinigen-paper": PolicyFigures(single, 0.6, single, 0.1, 0.13),
        },
        windows=2,
        prompt_tokens=2048,
        decoded_tokens=256,
        seconds=70.0,
    )


def page(diagnosis: Diagnosis | None = None, word: str = "plain") -> tuple[str, ET.Element]:
    html = render_page(
        diagnosis or made_up(),
        title=f"InfiniGen on {word}",
        command=f"infinigen-kv diagnose {word}",
        facts={"text": f"a text {word}"},
    )
    # but for elements without an end, the page is XML
    lines = [line for line in html.splitlines() if not line.startswith((*VOID, "<!DOCTYPE"))]
    return html, ET.fromstring("\n".join(lines))


def words(root: ET.Element) -> str:
    return " ".join("".join(root.itertext()).split())


def test_everything_is_on_it() -> None:
    _, root = page()
    text = words(root)
    for part in (
        *("InfiniGen on plain", "infinigen-kv diagnose plain", "a text plain", "Suitable"),
        *("layer 1: the previous layer's input says little", "--resident-layers 0,1"),
        *("infinigen-paper", "0.0200 to 0.0400", "does not select (first layer"),
        *("unpredictable", "What would help", "0.0300"),
    ):
        assert part in text, part
    assert "nan" not in text.lower().replace("infinigen", "")


def test_every_layer_is_in_every_chart() -> None:
    _, root = page()
    charts = root.findall(".//svg")
    assert len(charts) == 6
    titles = [[each.text or "" for each in chart.iter("title")] for chart in charts]
    for found in titles:
        assert {f"layer {index}," for index in range(1, 6)} == {
            " ".join(each.split()[:2]) for each in found
        }
    assert "layer 3, KL: 0.003" in titles[0]
    assert "layer 2, chosen: 90 %" in titles[1]
    assert "layer 4, head 1, attention mass left out: 15 %" in titles[5]
    assert len(titles[5]) == 5 * 3
    assert sum("all dimensions" in each for each in titles[2]) == 0  # unknown


def test_nothing_comes_from_elsewhere() -> None:
    html, root = page()
    tags = {each.tag for each in root.iter()}
    assert not tags & {"script", "link", "iframe", "img", "object"}
    attributes = {name for each in root.iter() for name in each.attrib}
    assert not attributes & {"src", "href", "srcset", "onload", "onclick"}
    assert "http" not in html and "url(" not in html and "@import" not in html


def test_text_is_no_markup() -> None:
    diagnosis = made_up()
    verdict = replace(diagnosis.verdict, reasons=(NASTY,), advice=(NASTY,))
    html, root = page(replace(diagnosis, verdict=verdict, unselected={0: NASTY}), NASTY)
    assert "<script" not in html
    assert words(root).count(NASTY) == 7  # title twice, command, reason, advice, layer, text


def test_a_verdict_that_needs_nothing() -> None:
    diagnosis = made_up()
    verdict = replace(diagnosis.verdict, advice=(), weak={})
    _, root = page(replace(diagnosis, verdict=verdict))
    assert "What would help" not in words(root)


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_without_a_package(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else found(name)
    )
    with pytest.raises(InputError, match=rf"{package}: pip install 'infinigen-kv\[plot\]'"):
        require_packages()
