"""What speed figures share: results of the bench as rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from infinigen_kv_lab.figures.figure import Figure
from infinigen_kv_lab.figures.rows import Row
from infinigen_kv_lab.figures.speed.measurement import SpeedMeasurement
from infinigen_kv_lab.figures.speed.setting import SpeedSetting
from infinigen_kv_lab.points import Result

Cases = list[tuple[Row, SpeedMeasurement]]
Results = Mapping[SpeedMeasurement, Result]


class SpeedFigure(Figure[SpeedSetting, SpeedMeasurement, Result]):
    """A figure made from measurements of speed.

    Where it ``shows_peers``, the page says which of them were left out.
    """

    figure_set = "speed"
    shows_peers: ClassVar[bool] = False


def systems(result: Result) -> list[Row]:
    """Policies and peers of a bench result, all with the same columns."""
    return [
        {
            "system": each.get("policy") or each["name"],
            "step_ms": each["step_ms_median"],
            "step_ms_p90": each["step_ms_p90"],
            "tokens_per_s": each["tokens_per_s"],
            "prompt_s": each["prompt_seconds"],
            "link_mb_per_step": _mega(each.get("link_bytes_per_step")),
            "link_wait_ms": each.get("link_wait_ms_per_step"),
            "fetched_share": each.get("fetched_share"),
            "resident_hit_rate": each.get("resident_hit_rate"),
            "kl_to_ideal": each["kl_to_ideal"],
        }
        for each in [*result["policies"], *result.get("peers", ())]
    ]


def one_system(result: Result, name: str) -> Row | None:
    """One row of `systems`; None where it was not measured."""
    return next((row for row in systems(result) if row["system"] == name), None)


def _mega(value: float | None) -> float | None:
    return None if value is None else value * 1e-6
