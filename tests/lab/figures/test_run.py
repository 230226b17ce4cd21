"""Measuring what is not there yet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from infinigen_kv import InputError
from infinigen_kv_lab.figures import catalogue
from infinigen_kv_lab.figures.drawing import Canvas, name_axes
from infinigen_kv_lab.figures.figure import Figure
from infinigen_kv_lab.figures.rig import Basis, Description, MeasurementRig
from infinigen_kv_lab.figures.rows import Row
from infinigen_kv_lab.figures.run import AnyWork, FigureOrder, make_figures, measure_all
from infinigen_kv_lab.figures.speed.measurement import SpeedMeasurement
from infinigen_kv_lab.figures.speed.rig import SpeedRig
from infinigen_kv_lab.figures.worklist import ShareDone, in_words, unheeded
from infinigen_kv_lab.points import PointStore

WANTED = [SpeedMeasurement(prompt_tokens=100, decode_tokens=count) for count in (1, 2, 3)]
RESULTS = {each: {"ms": 10 * each.decode_tokens} for each in WANTED}


class CountingRig(SpeedRig):
    """Counts, and fails where it is told to."""

    def __init__(
        self, folder: Path, say: Any = print, failing: Mapping[int, BaseException] | None = None
    ) -> None:
        super().__init__(cast(Any, None), cast(Any, None), "", PointStore(folder, say))
        self.calls: list[int] = []
        self._failing = failing or {}

    def about(self, measurement: SpeedMeasurement) -> Mapping[str, Any]:
        return {"model": measurement.model}

    def cost(self, measurement: SpeedMeasurement) -> float:
        return 1.0

    def perform(self, measurement: SpeedMeasurement) -> dict[str, Any]:
        count = measurement.decode_tokens
        self.calls.append(count)
        if count in self._failing:
            raise self._failing[count]
        return {"ms": 10 * count}


def measured(
    rig: SpeedRig,
    said: list[str] | None = None,
    *,
    again: bool = False,
    wanted: list[SpeedMeasurement] | None = None,
) -> AnyWork:
    say = (lambda text: None) if said is None else said.append
    return measure_all(WANTED if wanted is None else wanted, rig, say, again=again)


def test_each_measurement_once(tmp_path: Path) -> None:
    rig = CountingRig(tmp_path)
    assert measured(rig).results == RESULTS
    assert rig.calls == [1, 2, 3]
    for later in (rig, CountingRig(tmp_path)):
        said: list[str] = []
        assert measured(later, said).results == RESULTS
        assert said == ["3 of 3 points were measured before"]
    assert rig.calls == [1, 2, 3] and later.calls == []


def test_again(tmp_path: Path) -> None:
    rig = CountingRig(tmp_path)
    measured(rig)
    measured(rig, again=True)
    assert rig.calls == [1, 2, 3, 1, 2, 3]
    later = CountingRig(tmp_path)
    measured(later, again=True)
    assert later.calls == [1, 2, 3]


def test_a_damaged_file_is_measured_again(tmp_path: Path) -> None:
    said: list[str] = []
    measured(CountingRig(tmp_path))
    (tmp_path / WANTED[1].key({"model": ""}).file_name).write_text("{")
    rig = CountingRig(tmp_path, said.append)
    assert measured(rig, said).results == RESULTS
    assert rig.calls == [2]
    assert sum("damaged" in line for line in said) == 1


def test_files_of_versions_without_a_checksum_are_read(tmp_path: Path) -> None:
    """What the version before wrote: the head and the result, named by a digest of the head."""
    head = {"format": 1, "point": asdict(WANTED[0]), "model": ""}
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()[:16]
    path = tmp_path / f"bench-{digest}.json"
    path.write_text(json.dumps({**head, "result": {"ms": 7}}, indent=1))
    rig = CountingRig(tmp_path)
    assert measured(rig).results == {**RESULTS, WANTED[0]: {"ms": 7}}
    assert rig.calls == [2, 3]


@pytest.mark.parametrize("error", [InputError("too long"), torch.OutOfMemoryError("too long")])
def test_one_that_cannot_be_measured_leaves_the_others(
    tmp_path: Path, error: BaseException
) -> None:
    said: list[str] = []
    work = measured(CountingRig(tmp_path, failing={2: error}), said)
    assert list(work.results) == [WANTED[0], WANTED[2]]
    assert work.failed == {WANTED[1]: "too long"} and not work.interrupted
    assert any("cannot be measured: too long" in line for line in said)
    assert measured(CountingRig(tmp_path)).results.keys() == set(WANTED), "it is tried again"


def test_a_fault_of_the_program_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        measured(CountingRig(tmp_path, failing={2: ZeroDivisionError()}))


def test_an_interruption_keeps_what_is_done(tmp_path: Path) -> None:
    work = measured(CountingRig(tmp_path, failing={2: KeyboardInterrupt()}))
    assert work.interrupted and list(work.results) == WANTED[:1]
    rig = CountingRig(tmp_path)
    assert len(measured(rig).results) == 3
    assert rig.calls == [2, 3]


def test_those_of_other_models_are_looked_up_when_it_is_their_turn(tmp_path: Path) -> None:
    wanted = [*WANTED, SpeedMeasurement(model="other", prompt_tokens=100, decode_tokens=4)]
    rig = CountingRig(tmp_path)
    first = measured(rig, wanted=wanted)
    assert rig.calls == [1, 2, 3, 4]
    later = CountingRig(tmp_path)
    asked: list[str] = []
    about = later.about

    def loading(measurement: SpeedMeasurement) -> Mapping[str, Any]:
        asked.append(measurement.model)
        return about(measurement)

    later.about = loading  # type: ignore[method-assign]
    said: list[str] = []
    assert measured(later, said, wanted=wanted).results == first.results
    assert later.calls == [] and said[0] == "3 of 4 points were measured before"
    assert "other" not in asked[:3], "no other model is loaded before the rest is known"


def test_time_left_is_said_for_each(tmp_path: Path) -> None:
    said: list[str] = []
    measured(CountingRig(tmp_path), said)
    assert [line.split("]")[0] for line in said] == ["[1/3", "[2/3", "[3/3"]
    assert "not known yet" in said[0] and "left" in said[1]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (50, "50 s"), (720, "12 min"), (5400, "1 h 30 min"), (7500, "2 h 05 min")],
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


# Any set of figures: one class each for its setting, measurements, figures and rig.


@dataclass(frozen=True)
class Weighing:
    label: str
    kind: str = "weighing"


@dataclass(frozen=True)
class WeighingSetting:
    model: str
    weights: tuple[str, ...]


class Weights(Figure[WeighingSetting, Weighing, float]):
    figure_set = "weights"
    name = "scales"
    title = "What things weigh"
    about = "Nothing to see."

    def cases(self, setting: WeighingSetting) -> list[tuple[Row, Weighing]]:
        return [({"thing": each}, Weighing(each)) for each in setting.weights]

    def rows_of(self, result: float) -> list[Row]:
        return [{"grams": result}]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        axes = canvas.panels()[0][0]
        axes.bar([row["thing"] for row in rows], [row["grams"] for row in rows])
        name_axes(axes, "thing", "weight (g)")


class WeighingRig(MeasurementRig[WeighingSetting, Weighing, float]):
    figure_set = "weights"
    device = torch.device("cpu")

    def missing(self, measurement: Weighing) -> float:
        if measurement.label == "air":
            raise InputError("air has no weight here: weigh something else")
        return 0.5

    def measure(
        self, measurement: Weighing, done: ShareDone = unheeded, *, again: bool = False
    ) -> float:
        if measurement.label == "sand":
            raise KeyboardInterrupt
        return float(len(measurement.label))

    def partial(self, measurement: Weighing) -> float | None:
        return 0.5 if measurement.label == "sand" else None

    def cost(self, measurement: Weighing) -> float:
        return 1.0

    def describe(self, setting: WeighingSetting) -> Description:
        return Description(facts={"gravity": 9.81}, settings={"gravity": "9.81"})

    def basis(self, setting: Any, figure: Any, results: Mapping[Weighing, float]) -> Basis:
        return Basis(f"{len(results)} things")


def test_a_set_of_ones_own_is_measured_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = Weights()
    monkeypatch.setattr(catalogue, "FIGURES", (*catalogue.FIGURES, figure))
    assert catalogue.choose_figures("weights", "scales") == [figure]
    order = FigureOrder(figures=[figure], folder=tmp_path, command="typed")
    setting = WeighingSetting("scale", ("air", "iron", "sand", "wood"))
    said: list[str] = []
    outcome = make_figures(order, setting, WeighingRig(), said.append)
    assert outcome.interrupted and not outcome.missing
    values = json.loads((tmp_path / "figure-scales.json").read_text())
    assert values["rows"] == [{"thing": "iron", "grams": 4.0}, {"thing": "sand", "grams": 0.5}]
    assert values["gravity"] == 9.81
    assert values["remarks"] == ["Missing: air: air has no weight here: weigh something else"]
    assert (tmp_path / "figure-scales.csv").read_text() == "thing,grams\niron,4.0\nsand,0.5\n"
    assert "What things weigh" in (tmp_path / "index.html").read_text()
    assert [line.split(" (")[0] for line in said] == [
        "weighing: cannot be measured: air has no weight here: weigh something else",
        "[1/3] iron",
        "[2/3] sand",
    ]
