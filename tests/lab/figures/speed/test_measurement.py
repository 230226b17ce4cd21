"""Measurements of speed: what makes two of them differ."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from infinigen_kv import InfiniGenConfig, InputError
from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.calibration.tuned import Tuned
from infinigen_kv_lab.figures.speed.measurement import SpeedMeasurement

MEASUREMENT = SpeedMeasurement(policies=("stream",), prompt_tokens=100, decode_tokens=4)
UNTUNED = Calibration({}, {}, {})
ABOUT = {"model": "a", "threads": 2}
CHANGES: dict[str, Any] = {
    "kind": "blocks",
    "model": "other",
    "layers": 2,
    "policies": ("stream", "h2o"),
    "peers": ("StaticCache",),
    "prompt_tokens": 101,
    "decode_tokens": 5,
    "batch": 2,
    "link": "emulated:1",
    "home": "device",
    "resident": 0.0,
    "budget": 0.1,
    "rehearsal": "paper",
    "alpha": 4.25,
    "partial_ratio": 0.5,
    "max_fetch": 0.2,
}


def test_every_field_is_changed_below() -> None:
    assert {field.name for field in fields(SpeedMeasurement)} == set(CHANGES)


@pytest.mark.parametrize("name", CHANGES)
def test_any_other_setting_is_another_file(name: str) -> None:
    other = replace(MEASUREMENT, **{name: CHANGES[name]})
    assert other != MEASUREMENT
    assert other.key(ABOUT).file_name != MEASUREMENT.key(ABOUT).file_name


def test_model_and_machine_are_part_of_the_name() -> None:
    assert MEASUREMENT.key(ABOUT).file_name != MEASUREMENT.key({**ABOUT, "threads": 1}).file_name
    assert (
        MEASUREMENT.key(ABOUT).file_name == MEASUREMENT.key({"threads": 2, "model": "a"}).file_name
    )


def test_what_is_not_said_has_its_default() -> None:
    assert MEASUREMENT.config(UNTUNED) == InfiniGenConfig()
    config = replace(MEASUREMENT, rehearsal="paper", alpha=3.0).config(UNTUNED)
    assert config == InfiniGenConfig(rehearsal="paper", alpha=3.0)


def test_a_setting_out_of_range() -> None:
    with pytest.raises(InputError, match="alpha=-1"):
        replace(MEASUREMENT, alpha=-1.0).config(UNTUNED)


def test_what_was_tuned_goes_with_the_calibrated_rehearsal() -> None:
    made = replace(UNTUNED, tuned=Tuned((2.0, 5.0), 0.4, 0.5, 0.02))
    assert MEASUREMENT.config(made) == made.config()
    assert replace(MEASUREMENT, alpha=3.0).config(made).alpha == 3.0
    assert replace(MEASUREMENT, rehearsal="paper").config(made) == InfiniGenConfig(
        rehearsal="paper"
    )


def test_a_label_says_what_varies() -> None:
    varied = replace(MEASUREMENT, alpha=3.0, layers=2, link="emulated:1", batch=4)
    assert varied.label == "bench, 4 x 100 tokens, 2 layers, alpha 3, stream, emulated:1"
