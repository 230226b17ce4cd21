"""The runner: what is measured, kept, gone on with and measured again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from calibrating import selecting
from infinigen_kv import Calibration, InfiniGenConfig, Session, StorageConfig
from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.reading import Reader
from infinigen_kv_lab.evals.run import Subject, evaluate
from infinigen_kv_lab.evals.store import SampleStore
from infinigen_kv_lab.evals.task import Result, Sample, Task


@dataclass(frozen=True, slots=True)
class Sum(Result):
    total: float
    full: float | None


class Counting(Task):
    """Measures nothing, and notes what it was asked for."""

    name = "counting"

    def __init__(self, *, stop_at: int | None = None, shift: int = 0) -> None:
        self.asked: list[tuple[str, int]] = []
        self.prepared: list[int] = []
        self.seen_config: InfiniGenConfig | None = None
        self._stop_at = stop_at
        self._shift = shift

    @property
    def settings(self) -> dict[str, Any]:
        return {"shift": self._shift}

    def __len__(self) -> int:
        return 5

    def suits(self, policy: str) -> bool:
        return policy != "stream"

    def config(self, base: InfiniGenConfig) -> InfiniGenConfig:
        return InfiniGenConfig(min_context=base.min_context + 1)

    def prepare(self, session: Session, index: int) -> int:
        self.prepared.append(index)
        return index * 10

    def measure(self, reader: Reader, index: int, shared: int) -> Sample:
        if len(self.asked) == self._stop_at:
            raise KeyboardInterrupt
        self.seen_config = reader.session.config
        self.asked.append((reader.policy, index))
        return {"value": float(shared + self._shift), "odd": float("nan")}

    def summarise(self, samples: Sequence[Sample], full: Sequence[Sample] | None = None) -> Sum:
        assert all(each["odd"] is None for each in samples)
        reference = None if full is None else sum(each["value"] for each in full)
        return Sum(sum(each["value"] for each in samples), reference)


@pytest.fixture
def subject(model: PreTrainedModel, calibration: Calibration) -> Subject:
    return Subject(model, calibration, selecting(), StorageConfig())


def test_all_policies_are_measured_on_a_sample_before_the_next(subject: Subject) -> None:
    task = Counting()
    points = evaluate(subject, task, ["infinigen", "ideal", "infinigen"], limit=2)
    assert task.asked == [("infinigen", 0), ("ideal", 0), ("infinigen", 1), ("ideal", 1)]
    assert task.prepared == [0, 1]
    assert [point.policy for point in points] == ["infinigen", "ideal"]
    assert points[0].result == Sum(10.0, 10.0) and points[1].result == Sum(10.0, None)
    assert (points[0].samples, points[0].available) == (2, 5)
    assert task.seen_config is not None and task.seen_config.min_context == 9


def test_an_interrupted_run_goes_on_where_it_stopped(subject: Subject, tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        evaluate(subject, Counting(stop_at=3), ["infinigen", "ideal"], limit=4, store=store)
    task = Counting()
    points = evaluate(subject, task, ["infinigen", "ideal"], limit=4, store=store)
    assert task.asked == [
        *(("ideal", 1), ("infinigen", 2), ("ideal", 2), ("infinigen", 3), ("ideal", 3))
    ]
    assert points[0].result == Sum(60.0, 60.0)
    again = Counting()
    assert evaluate(subject, again, ["infinigen", "ideal"], limit=4, store=store)[0] == points[0]
    assert again.asked == again.prepared == []


def test_a_higher_limit_measures_the_rest_and_a_lower_one_nothing(
    subject: Subject, tmp_path: Path
) -> None:
    store = SampleStore(tmp_path)
    evaluate(subject, Counting(), ["infinigen"], limit=2, store=store)
    task = Counting()
    assert evaluate(subject, task, ["infinigen"], store=store)[0].result == Sum(100.0, None)
    assert task.asked == [("infinigen", 2), ("infinigen", 3), ("infinigen", 4)]
    task = Counting()
    assert evaluate(subject, task, ["infinigen"], limit=1, store=store)[0].result == Sum(0.0, None)
    assert task.asked == []


def test_a_damaged_point_is_measured_again(subject: Subject, tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    evaluate(subject, Counting(), ["infinigen", "ideal"], limit=2, store=store)
    (damaged,) = tmp_path.glob("*.infinigen.*")
    damaged.write_text('{"samples": [', encoding="utf-8")
    task = Counting()
    evaluate(subject, task, ["infinigen", "ideal"], limit=2, store=store)
    assert task.asked == [("infinigen", 0), ("infinigen", 1)]
    assert json.loads(damaged.read_text(encoding="utf-8"))["finished"] is True


def test_points_of_other_settings_are_measured_apart(
    subject: Subject, model: PreTrainedModel, calibration: Calibration, tmp_path: Path
) -> None:
    store = SampleStore(tmp_path)
    evaluate(subject, Counting(), ["infinigen"], limit=1, store=store)
    others: list[tuple[Subject, Counting]] = [
        (subject, Counting(shift=1)),
        (Subject(model, calibration, selecting(min_context=9), StorageConfig()), Counting()),
        (Subject(model, calibration, selecting(), StorageConfig(capacity=0.5)), Counting()),
        (Subject(model, calibration, selecting(), StorageConfig(), 0.4), Counting()),
    ]
    for other, task in others:
        evaluate(other, task, ["infinigen"], limit=1, store=store)
        assert task.asked == [("infinigen", 0)]
    assert len(list(tmp_path.iterdir())) == 5


def test_policies_that_do_not_suit_are_left_out(subject: Subject) -> None:
    points = evaluate(subject, Counting(), ["stream", "ideal"], limit=1)
    assert [point.policy for point in points] == ["ideal"]
    with pytest.raises(InputError, match="suits none of the policies stream"):
        evaluate(subject, Counting(), ["stream"])


@pytest.mark.parametrize(
    ("policies", "limit", "reason"),
    [
        ([], None, "name at least one"),
        (["ideal", "idael"], None, "idael"),
        (["ideal"], 0, "limit=0 is not valid"),
    ],
)
def test_bad_input(subject: Subject, policies: list[str], limit: int | None, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        evaluate(subject, Counting(), policies, limit=limit)


def test_progress_counts_what_is_left(subject: Subject, tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    evaluate(subject, Counting(), ["ideal"], limit=2, store=store)
    seen: list[tuple[str, int]] = []

    def watch(items: Any, description: str) -> Any:
        seen.append((description, len(items)))
        return items

    evaluate(subject, Counting(), ["ideal"], store=store, progress=watch)
    assert seen == [("counting", 3)]
