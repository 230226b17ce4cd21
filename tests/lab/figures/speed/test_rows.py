"""Tables of the figures, against formulas on made-up results."""

from __future__ import annotations

import math
from typing import Any

import pytest

import made_up_points as made_up
from infinigen_kv_lab.bench.run import RECORDED, WARM_UP
from infinigen_kv_lab.figures.catalogue import figures_of
from infinigen_kv_lab.figures.rows import Row
from infinigen_kv_lab.figures.speed.figure import SpeedFigure
from infinigen_kv_lab.figures.speed.lengths import PAPER_TOKENS
from infinigen_kv_lab.figures.speed.link_rates import break_even
from infinigen_kv_lab.figures.speed.measurement import SpeedMeasurement
from infinigen_kv_lab.figures.speed.pareto import OURS, below_ours
from infinigen_kv_lab.figures.speed.peer_results import PeerResults
from infinigen_kv_lab.figures.speed.setting import FULL_SCALE, QUICK_SCALE, SpeedScale, SpeedSetting

FIGURES = figures_of("speed")
SETTING = made_up.setting()


def rows(name: str, setting: SpeedSetting = SETTING) -> list[Row]:
    return FIGURES[name].rows(setting, made_up.found(FIGURES[name], setting))


def policy(measurement: SpeedMeasurement, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        each for each in made_up.result(measurement)["policies"] if each["policy"] == name
    )
    return found


@pytest.mark.parametrize("scale", [QUICK_SCALE, FULL_SCALE], ids=["quick", "full"])
@pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)
def test_all_rows_have_the_same_columns(figure: SpeedFigure, scale: SpeedScale) -> None:
    found = rows(figure.name, made_up.setting(scale))
    assert len({tuple(row) for row in found}) == 1


@pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)
def test_points_that_are_missing_leave_rows_out(figure: SpeedFigure) -> None:
    points = figure.measurements(SETTING)
    assert figure.rows(SETTING, {}) == []
    for point in points:
        rest = {each: made_up.result(each) for each in points if each != point}
        assert len(figure.rows(SETTING, rest)) < len(rows(figure.name)) or len(points) == 1


def test_14_is_ordered_and_has_every_system_but_the_oracle() -> None:
    found = rows("14")
    steps = [row["step_ms"] for row in found]
    assert steps == sorted(steps, reverse=True)
    names = {row["system"] for row in found}
    assert names == set(made_up.SYSTEMS) - {"oracle"} | {"DynamicCache", "StaticCache"}
    by_name = {row["system"]: row for row in found}
    base = policy(SETTING.headline(), "ideal")["step_ms_median"]
    step = policy(SETTING.headline(), "h2o")["step_ms_median"]
    assert by_name["h2o"]["ratio_to_ideal"] == pytest.approx(step / base)
    assert by_name["stream"]["paper_ratio_to_ideal"] == 18.55
    assert by_name["StaticCache"]["link_mb_per_step"] is None


def test_16a_counts_tokens_and_speed_ups() -> None:
    for row in rows("16a"):
        length = row["prompt_tokens"]
        base = length == FULL_SCALE.prompt_tokens
        point = SETTING.headline() if base else SETTING.sweep(prompt_tokens=length)
        own, streamed = policy(point, row["system"]), policy(point, "stream")
        speedup = streamed["step_ms_median"] / own["step_ms_median"]
        assert row["speedup_over_stream"] == pytest.approx(speedup)
        cached = length + WARM_UP + point.decode_tokens + (RECORDED - 1) / 2
        assert row["tokens_fetched"] == pytest.approx(own["fetched_share"] * cached)
        assert row["paper_tokens_fetched"] == PAPER_TOKENS.get(length)
    assert PAPER_TOKENS == {512: 37, 1024: 60, 1536: 66, 2048: 73}


def test_16b_cuts_the_model_or_takes_others() -> None:
    labels = list(dict.fromkeys(row["model"] for row in rows("16b")))
    first = [f"smollm2, first {count} of 30 layers" for count in (8, 15)]
    assert labels == [*first, "smollm2"]
    others = made_up.setting(models=("a", "b"))
    points = FIGURES["16b"].measurements(others)
    assert [(p.model, p.layers) for p in points] == [("", None), ("a", None), ("b", None)]
    assert {row["model"] for row in rows("16b", others)} == {"smollm2", "a", "b"}


def test_17_shares_the_point_with_default_settings() -> None:
    points = [point for _, point in FIGURES["17"].cases(SETTING)]
    plain = [point for point in points if point.alpha is None and point.partial_ratio is None]
    assert len(plain) == 4 and len(set(plain)) == 2
    varied = [(row["varied"], row["value"]) for row in rows("17")]
    assert varied == [
        *(("alpha", value) for value in FULL_SCALE.alphas),
        *(("partial_ratio", value) for value in FULL_SCALE.ratios),
    ]


def test_18_splits_add_up() -> None:
    for row in rows("18"):
        parts = ("transfer_ms", "attention_ms", "feed_forward_ms", "prediction_ms")
        assert sum(row[part] for part in parts) == pytest.approx(row["total_ms"])


# The rate below which a policy pays.


def steps(**times: tuple[float, ...]) -> list[Row]:
    rates = (0.25, 1.0, 4.0)
    return [
        {"system": name, "rate_gb_per_s": rate, "step_ms": step}
        for name, series in times.items()
        for rate, step in zip(rates, series, strict=True)
    ]


def test_break_even_between_two_rates() -> None:
    # the ratio to stream goes from 1/2 to 2 between 1 and 4 GB/s: equal in the middle, at 2
    found = steps(stream=(80.0, 40.0, 10.0), other=(20.0, 20.0, 20.0))
    assert break_even(found, "other") == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("times", "expected"), [((90.0, 10.0, 1.0), None), ((1.0, 1.0, 1.0), math.inf)]
)
def test_break_even_outside_the_rates(times: tuple[float, ...], expected: float | None) -> None:
    assert break_even(steps(stream=(80.0, 40.0, 10.0), other=times), "other") == expected


def test_break_even_without_stream() -> None:
    assert break_even(steps(other=(1.0, 1.0, 1.0)), "other") is None
    assert break_even(steps(stream=(3.0, 2.0, 1.0)), "stream") is None


def test_remarks_on_rates() -> None:
    figure = FIGURES["link"]
    found = steps(stream=(80.0, 40.0, 10.0), h2o=(20.0, 20.0, 20.0), quest=(90.0, 90.0, 90.0))
    said = figure.remarks(SETTING, found)
    assert said == ["h2o pays below 2 GB/s.", "quest pays at no rate from 0.25 GB/s on."]


# Accuracy against bytes.


def pareto_row(system: str, share: float, kl: float) -> Row:
    return {
        "system": system,
        "setting": "",
        "link_mb_per_token": share,
        "share_of_stream": share,
        "kl_to_ideal": kl,
    }


def test_points_below_infinigen() -> None:
    ours = [pareto_row(OURS[0], 0.002, 0.05), pareto_row(OURS[1], 0.1, 0.01)]
    beaten = [
        pareto_row("h2o", 0.05, 0.05),  # more bytes, the same KL
        pareto_row("h2o", 0.2, 0.02),
        pareto_row("oracle, no resident set", 0.05, 0.001),  # no system
        pareto_row("h2o", 0.005, 0.001),  # outside the span
        pareto_row("stream-int8", 0.5, 0.0001),
    ]
    below = [pareto_row("quest", 0.05, 0.04), pareto_row("stream-int4", 0.29, 0.005)]
    assert below_ours([*ours, *beaten]) == []
    assert below_ours([*ours, *beaten, *below]) == below


def test_guests_must_have_read_the_same_prompt() -> None:
    point = {"system": "SnapKV", "link_bytes_per_token": 1e6, "kl_to_ideal": 0.1}
    same = PeerResults("same.json", "kvpress", {"prompt_sha256": "made up"}, (point,))
    other = PeerResults("other.json", "kvpress", {"prompt_sha256": "another"}, (point, point))
    setting = made_up.setting(peer_results=(same, other))
    found = [row for row in rows("pareto", setting) if row["system"] == "SnapKV"]
    whole = policy(SETTING.headline(), "stream")["link_bytes_per_step"]
    assert len(found) == 1 and found[0]["share_of_stream"] == pytest.approx(1e6 / whole)
    said = FIGURES["pareto"].remarks(setting, rows("pareto", setting))
    assert any("other.json was measured on another prompt" in each for each in said)
    assert not any("same.json" in each for each in said)


def test_speeds_of_guests_are_drawn_with_ours() -> None:
    point = {"system": "llama.cpp", "context": 10, "tokens_per_s": 50.0}
    setting = made_up.setting(peer_results=(PeerResults("l.json", "llama.cpp 1", {}, (point,)),))
    found = rows("memory", setting)[-1]
    assert found["system"] == "llama.cpp" and found["source"] == "llama.cpp 1"
    assert found["step_ms"] == 20.0
