"""The verdict from made-up figures: levels, reasons that name layers, advice."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from infinigen_kv import InfiniGenConfig
from infinigen_kv_lab.diagnosis import Evidence, LayerEvidence, ResidentTrial, Thresholds, judge

GOOD = LayerEvidence(
    layer=0,
    similarity=0.9,
    unexplained=0.1,
    own_weights=0.2,
    calibration_unexplained=0.1,
    recall=0.7,
    recall_true_query=0.72,
    recall_all_dimensions=0.85,
    coverage=0.92,
    coverage_true_query=0.925,
    coverage_all_dimensions=0.935,
    best_coverage=0.94,
    concentration=0.07,
    fetched=0.09,
    wanted=0.1,
    harm=0.001,
    head_coverage=(0.95, 0.89),
)


def evidence(**changes: object) -> Evidence:
    """Ten good layers, 1 to 10; ``layer_3=...`` changes the figures of one."""
    layers = [replace(GOOD, layer=index) for index in range(1, 11)]
    for name in [each for each in changes if each.startswith("layer_")]:
        index = int(name.removeprefix("layer_")) - 1
        layers[index] = replace(layers[index], **changes.pop(name))  # type: ignore[arg-type]
    values = {"config": InfiniGenConfig(), "kl": 0.02, "fetched": 0.09, **changes}
    return Evidence(layers=tuple(layers), **values)  # type: ignore[arg-type]


def test_good_figures_suit() -> None:
    verdict = judge(evidence())
    assert verdict.level == "suitable"
    assert not verdict.weak and not verdict.advice
    assert any("0.02 nats" in reason for reason in verdict.reasons)
    assert any("9.0 % of the cache" in reason for reason in verdict.reasons)


@pytest.mark.parametrize(
    ("changes", "level", "word"),
    [
        ({"kl": 0.05}, "suitable", "nats"),
        ({"kl": 0.0501}, "suitable with care", "nats"),
        ({"kl": 0.25}, "suitable with care", "nats"),
        ({"kl": 0.2501}, "unsuitable", "nats"),
        ({"fetched": 0.3}, "suitable with care", "fetched"),
        ({"fetched": 0.6}, "unsuitable", "fetched"),
        ({"kl": 0.06, "fetched": 0.6}, "unsuitable", "fetched"),
    ],
)
def test_limits_of_the_whole_model(changes: dict[str, float], level: str, word: str) -> None:
    verdict = judge(evidence(**changes))
    assert verdict.level == level
    assert word in verdict.reasons[0]


def test_flat_attention_everywhere_does_not_suit_even_at_a_small_kl() -> None:
    flat = {"concentration": 0.6, "wanted": 0.8, "coverage": 0.3, "best_coverage": 0.35}
    verdict = judge(evidence(**{f"layer_{index}": flat for index in range(1, 11)}))
    assert verdict.level == "unsuitable"
    assert "80 % of the cache would be wanted" in verdict.reasons[0]
    reason = next(each for each in verdict.reasons if "flat attention" in each)
    assert reason.startswith("layers 1-10: flat attention: 60 % of the tokens carry 0.9")
    assert any("70 % of the attention mass" in each for each in verdict.reasons)
    assert any("10 of 10 layers" in each for each in verdict.reasons)
    assert any("--max-fetch 0.4, now 0.2" in each for each in verdict.advice)


def test_weak_layers_are_named_with_their_figures() -> None:
    verdict = judge(
        evidence(
            layer_1={"similarity": 0.03, "unexplained": 0.62},
            layer_2={"similarity": 0.11, "unexplained": 0.55, "concentration": 0.3},
            layer_5={"unexplained": 0.51},
            layer_7={"concentration": 0.38},
            layer_8={"best_coverage": 0.95, "coverage": 0.85, "coverage_true_query": 0.86},
            layer_9={"coverage": 0.7, "best_coverage": 0.72},
        )
    )
    assert verdict.weak == {
        1: ("unpredictable",),
        2: ("unpredictable", "flat"),
        5: ("unpredictable",),
        7: ("flat",),
        8: ("misled",),
        9: ("lossy",),
    }
    words = "\n".join(verdict.reasons)
    assert "layers 1, 2, 5: the previous layer's input says little about the query" in words
    assert "similarity 0.03 to 0.90, 51 to 62 % of the query's power missed" in words
    assert "layers 2, 7: flat attention: 30 to 38 % of the tokens" in words
    assert "layer 8: the rehearsal picks the wrong tokens" in words
    assert "10 % more of the mass (mostly the error of the partial dimensions)" in words
    assert "layer 9: too few tokens are fetched: 30 % of the mass" in words
    assert verdict.level == "suitable with care"  # six of ten layers are weak


def test_unpredictable_layers_without_a_known_similarity() -> None:
    verdict = judge(evidence(layer_4={"unexplained": 0.7, "similarity": math.nan}))
    assert any(
        each == "layer 4: the query is hard to predict (70 % of the query's power missed)"
        for each in verdict.reasons
    )
    assert verdict.level == "suitable"
    assert any("--resident-layers 0,4)" in each for each in verdict.advice)


def test_what_is_not_measured_decides_nothing() -> None:
    layers = tuple(LayerEvidence(index) for index in (1, 2))
    verdict = judge(Evidence(InfiniGenConfig(), layers))
    assert verdict == judge(Evidence(InfiniGenConfig(), ()))
    assert verdict.level == "suitable" and verdict.reasons == () and not verdict.weak
    assert judge(Evidence(InfiniGenConfig(), layers, kl=1.0)).level == "unsuitable"


def test_thresholds_of_the_callers_own() -> None:
    strict = Thresholds(kl=(0.01, 0.015))
    assert judge(evidence(), strict).level == "unsuitable"
    assert judge(evidence(), Thresholds(unexplained=0.05)).weak.keys() == set(range(1, 11))


def test_keeping_layers_is_advised_where_it_was_seen_to_help() -> None:
    helped = ResidentTrial(layers=(3,), kl=0.04, kl_kept=0.02)
    found = judge(evidence(trial=helped, layer_5={"unexplained": 0.9})).advice
    assert "layers 3, 5 on the device (--resident-layers 0,3,5)" in found[0]
    assert "KL 0.04 becomes 0.02 with layer 3 attended to in full" in found[0]
    assert "18 % of the cache" in found[0]  # 2 of 11 layers
    in_vain = ResidentTrial(layers=(3,), kl=0.04, kl_kept=0.039)
    assert judge(evidence(trial=in_vain)).advice == ()


def test_where_the_change_comes_from() -> None:
    words = " ".join(judge(evidence(best_kl=0.015)).reasons)
    assert "would change it by 0.015, so most of that comes from the small number" in words
    words = " ".join(judge(evidence(best_kl=0.005)).reasons)
    assert "comes from the rehearsal's errors" in words
    trial = ResidentTrial(layers=(3, 4), kl=0.04, kl_kept=0.039)
    words = " ".join(judge(evidence(trial=trial)).reasons)
    assert "layers 3, 4 harm most: attended to in full, KL goes from 0.04 to 0.039" in words


def test_advice_follows_from_what_is_wrong() -> None:
    def advice(**changes: object) -> str:
        return "\n".join(judge(evidence(**changes)).advice)

    many = range(1, 11)
    strange = {f"layer_{index}": {"unexplained": 0.3} for index in many}
    assert "calibrate on text like yours" in advice(**strange)
    assert "20 % more of the query's power" in advice(**strange)
    assert "--alpha 5.25, now 4.25" in advice(kl=0.1)
    assert "--max-fetch" not in advice(kl=0.1)
    wide = {f"layer_{index}": {"wanted": 0.24} for index in many}
    assert "--max-fetch 0.4, now 0.2" in advice(kl=0.1, **wide)
    assert "--partial-ratio 0.51, now 0.375" in advice(kl=0.1)
    sharp = {f"layer_{index}": {"coverage_true_query": 0.94} for index in many}
    assert "--partial-ratio" not in advice(kl=0.1, **sharp)
    assert "--rehearsal calibrated" in advice(config=InfiniGenConfig(rehearsal="paper"))
    by_layer = InfiniGenConfig(alpha=(4.0,) * 11)
    assert "infinigen-kv tune --target-kl" in advice(kl=0.1, config=by_layer)


def test_the_worst_head_and_unknown_heads() -> None:
    assert GOOD.worst_head == (1, 0.89)
    assert replace(GOOD, head_coverage=(math.nan, 0.5, 0.4)).worst_head == (2, 0.4)
    assert LayerEvidence(1).worst_head[0] == -1
