"""Points measured on a tiny model: the right call with the right settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import tiny
from calibrating import RandomTokenizer, calibrate_tiny, reference, tokens
from infinigen_kv import Calibration, InputError, attach
from infinigen_kv.policies.registry import POLICIES
from infinigen_kv.session import paper_link as paper_link_module
from infinigen_kv_lab.bench.fidelity import measure_fidelity
from infinigen_kv_lab.bench.peers import twin
from infinigen_kv_lab.figures.speed import rig as rig_module
from infinigen_kv_lab.figures.speed.measurement import SpeedMeasurement
from infinigen_kv_lab.figures.speed.rig import APART, SpeedRig
from infinigen_kv_lab.figures.speed.subject import Subject

TEXT = "x" * 900
FAST = "emulated:1000000"
MEASUREMENT = SpeedMeasurement(policies=("stream",), prompt_tokens=300, decode_tokens=2, link=FAST)


class Tokenizer(RandomTokenizer):
    name_or_path = "random"


def subject_of(model: PreTrainedModel, calibration: Calibration, name: str = "tiny") -> Subject:
    tokenizer: Any = Tokenizer()
    return Subject(model, tokenizer, calibration, name)


@pytest.fixture(scope="module")
def main() -> Subject:
    model = tiny.llama()
    return subject_of(model, calibrate_tiny(model))


@pytest.fixture
def rig(main: Subject) -> SpeedRig:
    def none(name: str) -> Subject:
        raise InputError(f"model {name!r}: no such model")

    return SpeedRig(main, none, TEXT)


def policies(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["policy"]: each for each in result["policies"]}


def test_a_bench_point(rig: SpeedRig) -> None:
    measurement = replace(
        MEASUREMENT, policies=("stream", "h2o"), batch=2, budget=0.1, peers=("DynamicCache",)
    )
    result = rig.measure(measurement)
    assert (result["batch"], result["prompt_tokens"], result["decode_tokens"]) == (2, 300, 2)
    found = policies(result)
    assert list(found) == ["ideal", "stream", "h2o"]
    assert found["h2o"]["fetched_share"] == pytest.approx(0.1, abs=0.01)
    whole = 2 * 300 * 4 * 2 * 2 * 16 * 4  # rows, tokens, layers, KV heads, K and V, D, bytes
    assert found["stream"]["link_bytes_per_step"] == pytest.approx(whole, rel=0.05)
    assert [each["name"] for each in result["peers"]] == ["DynamicCache"]
    assert result["peers"][0]["kl_to_ideal"] == pytest.approx(0, abs=1e-5)
    count = sum(each.numel() for each in rig.main.model.parameters())
    assert result["parameters"] == count


def test_settings_of_the_selection_and_the_resident_set(rig: SpeedRig) -> None:
    own = replace(MEASUREMENT, policies=("infinigen",), max_fetch=0.5, alpha=1e6, resident=0.9)
    many = policies(rig.measure(own))["infinigen"]
    few = policies(rig.measure(replace(own, max_fetch=0.2, resident=0.0)))["infinigen"]
    assert many["fetched_share"] == pytest.approx(0.5, abs=0.01)
    assert few["fetched_share"] == pytest.approx(0.2, abs=0.01)
    assert few["resident_hit_rate"] == 0 < many["resident_hit_rate"]


def test_one_memory_moves_nothing(rig: SpeedRig) -> None:
    measurement = replace(MEASUREMENT, policies=("infinigen",), home="device", link="none")
    assert policies(rig.measure(measurement))["infinigen"]["link_bytes_per_step"] == 0


def test_a_fidelity_point(rig: SpeedRig) -> None:
    measurement = replace(
        MEASUREMENT, kind="fidelity", policies=("infinigen",), alpha=1.0, decode_tokens=20
    )
    ids = torch.tensor(Tokenizer()(TEXT)["input_ids"][:320])
    main = rig.main
    expected = measure_fidelity(
        main.model, main.calibration, measurement.config(main.calibration), ids, prompt_tokens=300
    ).to_dict()
    found = rig.measure(measurement)
    for name in ("kl_mean", "ppl", "ppl_full", "fetched_share"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4)


def test_a_blocks_point(rig: SpeedRig) -> None:
    found = rig.measure(replace(MEASUREMENT, kind="blocks", policies=("ideal", "stream")))
    assert list(found["blocks"]) == ["ideal", "stream"] and found["link"] == FAST
    assert found["blocks"]["ideal"]["total"] > 0


def test_a_rate_point(rig: SpeedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = paper_link_module.timed_forward
    monkeypatch.setattr(paper_link_module, "timed_forward", lambda *given: (timed(*given)[0], 40.0))
    found = rig.measure(SpeedMeasurement(kind="rate", prompt_tokens=300, decode_tokens=1))
    layer = 300 * 2 * 2 * 16 * 4  # tokens, KV heads, K and V, D, bytes: in 18.5 times 10 ms
    assert found["rate"] == pytest.approx(layer / (18.5 * 0.010))


# Models.


def test_fewer_layers(rig: SpeedRig) -> None:
    result = rig.measure(replace(MEASUREMENT, policies=("infinigen",), layers=2))
    assert result["parameters"] < rig.measure(MEASUREMENT)["parameters"]


def test_a_cut_model_is_calibrated_as_if_it_had_been_calibrated_itself(main: Subject) -> None:
    cut = main.cut(2)
    ids = tokens(1, 60)
    own = twin(main.model, layers=2)
    assert torch.equal(reference(cut.model, ids, prompt=50), reference(own, ids, prompt=50))
    expected = calibrate_tiny(own)
    assert cut.calibration.layers.keys() == expected.layers.keys()
    for index, layer in expected.layers.items():
        found = cut.calibration.layers[index]
        correction = found.down @ found.up
        assert torch.allclose(correction, layer.down @ layer.up, atol=1e-3)
    with attach(cut.model, cut.calibration) as session:
        assert len(session.adapter.layers) == 2
    assert main.layers == 4


def test_other_models_are_opened_one_at_a_time(main: Subject) -> None:
    model = tiny.qwen2()
    opened: list[str] = []

    def open_subject(name: str) -> Subject:
        opened.append(name)
        return subject_of(model, calibrate_tiny(model), name)

    rig = SpeedRig(main, open_subject, TEXT)
    measurement = replace(MEASUREMENT, model="other")
    about = rig.about(measurement)
    assert about["model"] != rig.about(MEASUREMENT)["model"]
    result = rig.measure(measurement)
    assert result["parameters"] == sum(each.numel() for each in model.parameters())
    rig.measure(MEASUREMENT)
    assert opened == ["other"]


def test_a_model_that_cannot_be_had(rig: SpeedRig) -> None:
    with pytest.raises(InputError, match="no such model"):
        rig.about(replace(MEASUREMENT, model="missing"))


def test_what_a_result_depends_on(rig: SpeedRig, main: Subject) -> None:
    about = rig.about(MEASUREMENT)
    assert about["dtype"] == "float32" and about["threads"] == torch.get_num_threads()
    longer = SpeedRig(main, lambda name: main, TEXT + "x")
    assert longer.about(MEASUREMENT)["text"] != about["text"]
    assert rig.about(replace(MEASUREMENT, layers=2))["model"] != about["model"]


# Prompts, policies, limits.


def test_rows_start_apart(rig: SpeedRig, main: Subject) -> None:
    ids = Tokenizer()(TEXT)["input_ids"]
    prompt = rig.prompt(main, 2, 100)
    assert prompt.tolist() == [ids[:100], ids[APART : APART + 100]]


def test_a_text_that_is_too_short(rig: SpeedRig, main: Subject) -> None:
    with pytest.raises(InputError, match="need a text of 901 tokens, but it has 900"):
        rig.prompt(main, 2, 901 - APART)


def test_policies_that_a_model_cannot_run_are_left_out(
    rig: SpeedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    assert rig.runnable(tuple(POLICIES), said.append) == tuple(POLICIES) and said == []
    original = rig_module.Session.new_cache

    def new_cache(session: Any, **options: Any) -> Any:
        if options["policy"] == "h2o":
            raise InputError("not with this model")
        return original(session, **options)

    monkeypatch.setattr(rig_module.Session, "new_cache", new_cache)
    assert rig.runnable(("stream", "h2o"), said.append) == ("stream",)
    assert said == ["policy h2o is left out: not with this model"]


def test_more_tokens_than_positions(rig: SpeedRig) -> None:
    with pytest.raises(InputError, match="positions"):
        rig.measure(replace(MEASUREMENT, prompt_tokens=500, decode_tokens=20))


def test_what_does_not_fit_into_memory_is_refused(
    rig: SpeedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infinigen_kv.memory import budget

    monkeypatch.setattr(budget, "available_memory", lambda: 1000)
    with pytest.raises(InputError, match="the run needs"):
        rig.measure(MEASUREMENT)
