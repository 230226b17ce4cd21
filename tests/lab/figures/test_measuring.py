"""Measuring what is not there yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from infinigen_kv import InputError
from infinigen_kv.files import PointStore
from infinigen_kv_lab.figures.measuring import Measured, measure_points
from infinigen_kv_lab.figures.point import Point
from infinigen_kv_lab.figures.worklist import in_words

POINTS = [Point(prompt_tokens=100, decode_tokens=count) for count in (1, 2, 3)]


class Fake:
    """Counts, and fails where it is told to."""

    def __init__(self, failing: Mapping[int, BaseException] | None = None) -> None:
        self.calls: list[int] = []
        self._failing = failing or {}

    def about(self, point: Point) -> Mapping[str, Any]:
        return {"model": point.model}

    def measure(self, point: Point) -> dict[str, Any]:
        self.calls.append(point.decode_tokens)
        if point.decode_tokens in self._failing:
            raise self._failing[point.decode_tokens]
        return {"ms": 10 * point.decode_tokens}


def measured(
    fake: Fake,
    folder: Path,
    said: list[str] | None = None,
    *,
    again: bool = False,
    points: list[Point] | None = None,
) -> Measured:
    say = (lambda text: None) if said is None else said.append
    return measure_points(
        POINTS if points is None else points,
        fake,
        PointStore(folder, say),
        again=again,
        cost=lambda point: 1.0,
        say=say,
    )


def test_each_point_once(tmp_path: Path) -> None:
    fake = Fake()
    found = measured(fake, tmp_path).found
    assert found == {point: {"ms": 10 * point.decode_tokens} for point in POINTS}
    assert fake.calls == [1, 2, 3]
    said: list[str] = []
    assert measured(fake, tmp_path, said).found == found
    assert fake.calls == [1, 2, 3] and said == ["3 of 3 points were measured before"]


def test_again(tmp_path: Path) -> None:
    fake = Fake()
    measured(fake, tmp_path)
    measured(fake, tmp_path, again=True)
    assert fake.calls == [1, 2, 3, 1, 2, 3]


def test_a_damaged_file_is_measured_again(tmp_path: Path) -> None:
    fake = Fake()
    said: list[str] = []
    measured(fake, tmp_path)
    PointStore(tmp_path, print).path(POINTS[1], {"model": ""}).write_text("{")
    found = measured(fake, tmp_path, said).found
    assert fake.calls == [1, 2, 3, 2] and len(found) == 3
    assert any("damaged" in line for line in said)


@pytest.mark.parametrize("error", [InputError("too long"), torch.OutOfMemoryError("too long")])
def test_a_point_that_cannot_be_measured_leaves_the_others(
    tmp_path: Path, error: BaseException
) -> None:
    fake = Fake({2: error})
    said: list[str] = []
    result = measured(fake, tmp_path, said)
    assert list(result.found) == [POINTS[0], POINTS[2]]
    assert result.failed == {POINTS[1]: "too long"} and not result.interrupted
    assert any("cannot be measured: too long" in line for line in said)
    assert measured(Fake(), tmp_path).found.keys() == set(POINTS), "it is tried again"


def test_a_fault_of_the_program_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        measured(Fake({2: ZeroDivisionError()}), tmp_path)


def test_an_interruption_keeps_what_is_done(tmp_path: Path) -> None:
    result = measured(Fake({2: KeyboardInterrupt()}), tmp_path)
    assert result.interrupted and list(result.found) == POINTS[:1]
    fake = Fake()
    assert len(measured(fake, tmp_path).found) == 3
    assert fake.calls == [2, 3]


def test_points_of_other_models_are_looked_up_when_it_is_their_turn(tmp_path: Path) -> None:
    points = [*POINTS, Point(model="other", prompt_tokens=100, decode_tokens=4)]
    fake = Fake()
    first = measured(fake, tmp_path, points=points)
    assert fake.calls == [1, 2, 3, 4]
    assert measured(fake, tmp_path, points=points).found == first.found
    assert fake.calls == [1, 2, 3, 4]


def test_time_left_is_said_for_each_point(tmp_path: Path) -> None:
    said: list[str] = []
    measured(Fake(), tmp_path, said)
    assert [line.split("]")[0] for line in said] == ["[1/3", "[2/3", "[3/3"]
    assert "not known yet" in said[0] and "left" in said[1]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (50, "50 s"), (720, "12 min"), (5400, "1 h 30 min"), (7500, "2 h 05 min")],
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
