"""All accuracy figures of a tiny model: what is written, kept and drawn, and what cannot be."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from accuracy_data import SCALE, data_folder
from calibrating import calibrate_tiny
from command_line import tokenizer
from infinigen_kv_lab.evals import similarity
from infinigen_kv_lab.figures.accuracy.rig import AccuracyRig
from infinigen_kv_lab.figures.accuracy.setting import AccuracySetting
from infinigen_kv_lab.figures.catalogue import choose_figures, figures_of
from infinigen_kv_lab.figures.drawing import Canvas
from infinigen_kv_lab.figures.run import FigureOrder, Outcome, make_figures, measurements_of
from legible import check_legible
from tiny import llama

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
ACCURACY_FIGURES = figures_of("accuracy")
DRAWN = [name for name in ACCURACY_FIGURES if name != "11" or HAS_HARNESS]
SETTING = AccuracySetting(scale=SCALE, model="tiny")


class Bench:
    """A tiny model with a folder for its figures."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.out.mkdir()
        self.data = data_folder(folder / "data")
        self.said: list[str] = []
        model = llama()
        self._parts = (model, tokenizer(), calibrate_tiny(model))

    def make(self, names: str | None = None, *, again: bool = False) -> Outcome:
        self.said.clear()
        order = FigureOrder(
            figures=choose_figures("accuracy", names), folder=self.out, command="typed", again=again
        )
        return make_figures(order, SETTING, self.rig(), self.said.append)

    def rig(self) -> AccuracyRig:
        return AccuracyRig(*self._parts, self.data, self.out / "points")

    def rows(self, name: str) -> list[dict[str, Any]]:
        (path,) = (each for each in self.made.files[name] if each.suffix == ".json")
        return list(json.loads(path.read_text())["rows"])

    made: Outcome


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """All figures, made once."""
    made = Bench(tmp_path_factory.mktemp("accuracy"))
    made.made = made.make()
    return made


def test_every_figure_has_its_files_and_its_place_on_the_page(bench: Bench) -> None:
    assert list(bench.made.files) == DRAWN and not bench.made.interrupted
    page = bench.made.page.read_text()
    for name in DRAWN:
        png, table, values = bench.made.files[name]
        assert png.read_bytes().startswith(b"\x89PNG")
        held = json.loads(values.read_text())
        assert held["model"] == "tiny" and held["dtype"] == "float32"
        with table.open() as lines:
            rows = list(csv.DictReader(lines))
        assert len(rows) == len(held["rows"]) and list(rows[0]) == list(held["rows"][0])
        assert all(list(row) == list(held["rows"][0]) for row in held["rows"])
        assert ACCURACY_FIGURES[name].title.replace("'", "&#39;") in page
        assert any("Measured on" in each for each in held["remarks"])
    assert (bench.out / "table-1.png").exists() and (bench.out / "figure-12.csv").exists()
    assert "Table 2: " in page and "Figure 19: " in page and "http" not in page
    if not HAS_HARNESS:
        assert "lm-evaluation-harness" in bench.made.missing["11"]
        assert sum("lm-evaluation-harness" in line for line in bench.said) <= 5


@pytest.mark.parametrize("name", DRAWN)
def test_nothing_lies_over_anything_else(bench: Bench, name: str) -> None:
    figure = ACCURACY_FIGURES[name]
    canvas = Canvas(figure.title, "tiny, float32 | 2 of 6 windows of wikitext2")
    figure.draw(canvas, bench.rows(name))
    canvas.finish()
    canvas.figure.draw_without_rendering()
    check_legible(canvas)
    for axes in (each for each in canvas.figure.axes if each.get_visible()):
        assert axes.get_ylabel() or axes.get_xlabel()


def test_nothing_is_evaluated_twice_and_figures_of_earlier_runs_stay(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*unused: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr("infinigen_kv_lab.evals.run._measure", never)
    made = bench.make("table-1,7")
    assert list(made.files) == DRAWN, "all evaluations of the others are there"
    assert bench.said == ["2 of 2 points were measured before"]


def test_a_damaged_sample_is_measured_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.make("table-1,7")
    (victim,) = (bench.out / "points").glob("similarity.*.json")
    victim.write_text(victim.read_text()[:40])
    bench.make("table-1,7")
    steps = [line for line in bench.said if line.startswith("[")]
    assert len(steps) == 1 and steps[0].startswith("[1/1] similarity")
    assert len(json.loads(victim.read_text())["samples"]) == 2
    bench.make("table-1,7", again=True)
    assert [line[:5] for line in bench.said if line.startswith("[")] == ["[1/2]", "[2/2]"]


def test_ctrl_c_keeps_and_draws_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    measure = similarity.SimilarityTask.measure

    def interrupted(self: Any, reader: Any, index: int, shared: Any) -> Any:
        if index == 1:
            raise KeyboardInterrupt
        return measure(self, reader, index, shared)

    with monkeypatch.context() as patch:
        patch.setattr(similarity.SimilarityTask, "measure", interrupted)
        made = bench.make("table-1,7")
    assert made.interrupted and list(made.files) == ["table-1"]
    assert "not measured yet" in made.missing["7"]
    held = json.loads((bench.out / "table-1.json").read_text())
    assert any(each.startswith("Measured on: similarity: 1 of ") for each in held["remarks"])
    made = bench.make("table-1,7")
    assert list(made.files) == ["table-1", "7"] and not made.interrupted
    held = json.loads((bench.out / "table-1.json").read_text())
    assert any(each.startswith("Measured on: similarity: 2 of ") for each in held["remarks"])


def test_data_that_is_not_there_leaves_the_other_figures(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (bench.data / "passkey" / "prompt_template.txt").unlink()
    made = bench.make("passkey,table-1")
    assert list(made.files) == ["table-1"]
    reason = made.missing["passkey"]
    assert "prompt_template.txt is missing: fetch" in reason and "put it there" in reason
    assert sum("prompt_template.txt is missing" in line for line in bench.said) == 1
    assert "Figure passkey: " in made.page.read_text()


# What the tables hold.


def test_figures_rest_on_the_same_evaluations_as_the_command_eval(bench: Bench) -> None:
    """One code path: the library's own call gives the table's numbers."""
    (trial,) = ACCURACY_FIGURES["table-1"].measurements(SETTING)
    assert trial in measurements_of(list(ACCURACY_FIGURES.values()), SETTING)
    result: Any = bench.rig().measure(trial)["ideal"].result
    rows = bench.rows("table-1")
    assert [row["layer"] for row in rows] == [1, 2, 3]
    assert [row["block_input"] for row in rows] == pytest.approx(result.block_input.values)


def test_sizes_are_what_was_asked_for(bench: Bench) -> None:
    rows = [row for row in bench.rows("19") if row["varied"] == "share"]
    for row in rows:
        # rounded down to whole tokens; infinigen keeps its 33 newest and oldest in any case
        share = max(100 * row["value"], 100 * 33 / 290 if row["system"] == "infinigen" else 0)
        assert share - 1 < row["fetched_percent"] <= share + 0.01, row
    fixed = [row for row in bench.rows("19") if row["varied"] == "length"]
    assert {row["value"] for row in fixed} == {264, 300}
    for row in fixed:
        tokens = row["fetched_percent"] / 100 * (row["value"] + SCALE.length_tokens / 2)
        assert 60 < tokens < 70, row


def test_without_a_limit_nothing_is_missed(bench: Bench) -> None:
    rows = bench.rows("table-2")
    whole = [row for row in rows if row["capacity_percent"] == 100]
    assert [row["system"] for row in whole] == ["counter", "lru", "fifo"]
    assert len({row["perplexity"] for row in whole}) == 1
    assert all(row["missed_percent"] == 0 for row in whole)
    half = [row for row in rows if row["capacity_percent"] == 50]
    assert len(half) == 3 and all(row["missed_percent"] > 0 for row in half)


def test_packed_homes_hold_less(bench: Bench) -> None:
    rows = {(row["system"], row["codec"]): row for row in bench.rows("codecs")}
    for system in ("infinigen", "stream"):
        held = [rows[system, codec]["home_mb"] for codec in ("none", "int8", "int4")]
        assert held == sorted(held, reverse=True) and held[-1] > 0
    assert rows["stream", "none"]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert rows["stream", "int4"]["kl"] > rows["stream", "int8"]["kl"] > 0


def test_cells_of_a_map_add_up(bench: Bench) -> None:
    for name, asked in (("passkey", 3), ("needles", 5)):
        rows = [row for row in bench.rows(name) if row["system"] == "infinigen"]
        assert sum(row["asked"] for row in rows) == asked == rows[0]["asked_of_all"]
        assert sum(row["right"] for row in rows) == rows[0]["right_of_all"]
