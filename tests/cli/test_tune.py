"""``infinigen-kv tune``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from command_line import Run, last_json, refusal
from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv_lab.tuning.harm import HarmMeter
from infinigen_kv_lab.tuning.trial import Trials

SMALL = ("--prompt-tokens", 48, "--decode-tokens", 12, "--windows", 2, "--target-kl", 0.01)


@pytest.fixture
def artefact(run: Run, model_folder: Path, text_file: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "artefact"
    last_json(run("calibrate", model_folder, "--text", text_file, "--output", folder, "--json"))
    return folder


def test_settings_are_stored_and_used_by_the_other_commands(
    run: Run, model_folder: Path, text_file: Path, artefact: Path
) -> None:
    tune = ("tune", model_folder, "--calibration", artefact, "--text", text_file, *SMALL)
    result = run(*tune, "--json")
    found = last_json(result)
    tuned = Calibration.load(artefact).tuned
    assert tuned is not None and list(tuned.alpha) == found["alpha"]
    assert len(found["alpha"]) == 4 and found["target_kl"] == 0.01
    assert "alpha by layer" in result.stdout and "held back" in result.stdout
    fidelity = (
        *("fidelity", model_folder, "--text", text_file, "--calibration", artefact, "--json"),
        *("--prompt-tokens", 300, "--decode-tokens", 20),
    )
    result = run(*fidelity)
    used = last_json(result)["config"]
    assert used["alpha"] == found["alpha"] and used["max_fetch"] == found["max_fetch"]
    assert "using the settings tuned for this model (KL 0.01)" in result.stderr
    used = last_json(run(*fidelity, "--alpha", 3))["config"]
    assert used["alpha"] == 3 and used["max_fetch"] == found["max_fetch"]
    run("tune", model_folder, "--calibration", artefact, "--forget")
    assert Calibration.load(artefact).tuned is None
    assert last_json(run(*fidelity))["config"]["alpha"] == 4.25


def test_what_was_measured_is_kept_for_another_target(
    run: Run, model_folder: Path, text_file: Path, artefact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune = ("tune", model_folder, "--calibration", artefact, "--text", text_file, *SMALL)
    first = last_json(run(*tune, "--alpha-only", "--json"))
    assert first["measured"]["alternatives"] == []
    kept = Path(os.environ["INFINIGEN_KV_CACHE"]) / "tuning"
    assert len(list(kept.glob("*/harm-*.json"))) == 2

    def refuse(*_: object) -> None:
        raise AssertionError("is measured again")

    with monkeypatch.context() as patch:
        patch.setattr(HarmMeter, "read", refuse)
        patch.setattr(Trials, "_decode", refuse)
        assert last_json(run(*tune, "--alpha-only", "--json")) == first
        assert run(*tune, "--alpha-only", "--again").exit_code != 0
    run("tune", model_folder, "--calibration", artefact, "--forget")
    assert last_json(run(*tune, "--alpha-only", "--json")) == first


def test_other_settings_are_tried_and_said(
    run: Run, model_folder: Path, text_file: Path, artefact: Path
) -> None:
    tune = ("tune", model_folder, "--calibration", artefact, "--text", text_file, *SMALL)
    result = run(*tune, "--json")
    tried = last_json(result)["measured"]["alternatives"]
    assert {each["partial_ratio"] for each in tried} == {0.25, 0.375, 0.5}
    assert "tried at equal device memory" in result.stdout
    assert "trying partial ratios" in result.stderr
    fixed = run(*tune, "--json", "--partial-ratio", 0.25, "--resident", "30%", "--max-fetch", 0.25)
    assert last_json(fixed)["measured"]["alternatives"] == []


def test_the_tuned_resident_set_and_layers_are_used(
    run: Run, model_folder: Path, text_file: Path, artefact: Path
) -> None:
    options = ("--resident", "40%", "--resident-layers", "0,2", "--alpha-only")
    tune = ("tune", model_folder, "--calibration", artefact, "--text", text_file, *SMALL)
    assert run(*tune, *options).exit_code == 0
    context = ("--prompt-tokens", 100, "--decode-tokens", 3, "--text", text_file)
    bench = ("bench", model_folder, "--calibration", artefact, *context, "--json")
    used = last_json(run(*bench, "--link", "emulated:1000"))["storage"]
    assert (used["resident"], used["resident_layers"]) == (0.4, [0, 2])
    given = ("--resident", "10%", "--resident-layers", "none")
    used = last_json(run(*bench, "--link", "emulated:1000", *given))["storage"]
    assert (used["resident"], used["resident_layers"]) == (0.1, [])
    used = last_json(run(*bench))["storage"]  # nothing moves
    assert (used["resident"], used["resident_layers"]) == (None, "auto")
    plan = ("plan", model_folder, "--calibration", artefact, "--context", 200, "--json")
    used = last_json(run(*plan, "--link", "emulated:1000"))["storage"]
    assert (used["resident"], used["resident_layers"]) == (0.4, [0, 2])
    prompt = ("--prompt", "some words " * 9, "--max-new-tokens", 2, "--calibration", artefact)
    used = last_json(run("generate", model_folder, *prompt, "--link", "emulated:1000", "--json"))
    assert used["storage"]["resident_layers"] == [0, 2]


def test_a_target_out_of_reach_is_said(
    run: Run, model_folder: Path, text_file: Path, artefact: Path
) -> None:
    result = run(
        *("tune", model_folder, "--calibration", artefact, "--text", text_file, *SMALL),
        *("--target-kl", 1e-9, "--max-fetch", 0.1, "--json"),
    )
    found = last_json(result)
    assert not found["measured"]["reached"]
    assert "out of reach" in result.stdout and "--max-fetch" in result.stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--target-kl", 0), "--target-kl 0.0 is not valid: it must be a number of nats above 0"),
        (("--max-fetch", 2), "--max-fetch 2.0 is not valid: it must be a number in (0, 1]"),
        (("--partial-ratio", 0), "--partial-ratio 0.0 is not valid"),
        (("--resident", "much"), "--resident 'much' is not valid"),
        (("--resident-layers", "first"), "--resident-layers 'first' is not valid"),
        (("--resident", "200%"), "--resident 2.0 is not valid: it must be a share in [0, 1]"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded(
    run: Run, options: tuple[object, ...], reason: str
) -> None:
    result = run("tune", "./no-model", *options)
    assert reason in refusal(result)
    assert "loading" not in result.stderr


def test_a_folder_that_cannot_be_replaced_is_refused_before_the_model_is_loaded(
    run: Run, artefact: Path
) -> None:
    (artefact / "notes.txt").write_text("mine", encoding="utf-8")
    result = run("tune", "./no-model", "--calibration", artefact)
    assert "exists and is not a calibration" in refusal(result)
    assert "loading" not in result.stderr


def test_text_too_short(run: Run, model_folder: Path, tmp_path: Path, artefact: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("too short", encoding="utf-8")
    result = run("tune", model_folder, "--calibration", artefact, "--text", path, *SMALL)
    assert "the text has 9 tokens: it must have at least 120" in refusal(result)


def test_a_window_longer_than_the_models_positions(
    run: Run, model_folder: Path, artefact: Path
) -> None:
    result = run("tune", model_folder, "--calibration", artefact, "--prompt-tokens", 99999)
    reason = refusal(result)
    assert "windows of 100143 tokens (99999 and 144) are longer than the model's" in reason
    assert "choose fewer prompt tokens" in reason


@pytest.mark.parametrize("again", [("--forget",), SMALL])
@pytest.mark.parametrize("alpha", [[2.0], ["x"] * 4])
def test_damaged_settings_can_be_tuned_again_or_forgotten(
    run: Run,
    model_folder: Path,
    text_file: Path,
    artefact: Path,
    alpha: list[object],
    again: tuple[object, ...],
) -> None:
    header = artefact / "calibration.json"
    values = json.loads(header.read_text(encoding="utf-8"))
    rest = {"max_fetch": 0.3, "partial_ratio": 0.375, "target_kl": 0.02, "measured": {}}
    values["tuned"] = {"alpha": alpha, **rest}
    header.write_text(json.dumps(values), encoding="utf-8")
    options = ("--calibration", artefact, "--text", text_file)
    short = ("--prompt-tokens", 300, "--decode-tokens", 8)
    assert "tune" in refusal(run("fidelity", model_folder, *options, *short))
    assert run("tune", model_folder, *options, *again).exit_code == 0
    assert run("fidelity", model_folder, *options, *short).exit_code == 0
