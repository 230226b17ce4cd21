"""Measurements that are kept: an interrupted tuning goes on, and another one reuses them."""

import json
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrating import RandomTokenizer, calibrate_tiny
from infinigen_kv.calibration.tuned import Tuned
from infinigen_kv.errors import InputError
from infinigen_kv_lab.points import PointStore
from infinigen_kv_lab.tuning import tune
from infinigen_kv_lab.tuning.harm import HarmMeter
from infinigen_kv_lab.tuning.measurements import (
    Measurement,
    Measurements,
    default_folder,
    dependencies,
    window_digest,
)
from infinigen_kv_lab.tuning.options import TuneOptions
from infinigen_kv_lab.tuning.search import ALPHAS, ROUNDS
from infinigen_kv_lab.tuning.trial import Trials
from infinigen_kv_lab.tuning.windows import Window
from tiny import TINY

SMALL = TuneOptions(
    target_kl=0.2, max_fetch=0.6, prompt_tokens=150, decode_tokens=20, windows=1, resident=0.2
)
TEXT = ["x" * 800]
MODEL = TINY["llama"]().eval()
_MADE = calibrate_tiny(MODEL)
CALIBRATION = replace(  # no layer counts as hard to predict, so that all but the first select
    _MADE, report={layer: {**fit, "unexplained": 0.1} for layer, fit in _MADE.report.items()}
)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often windows are really measured."""
    counted: Counter[str] = Counter()
    for owner, name in ((Trials, "_decode"), (HarmMeter, "read")):
        real = getattr(owner, name)

        def call(*args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
            counted[_name] += 1
            return _real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)
    return counted


def _tune(folder: Path | None, *, again: bool = False, **changes: Any) -> Tuned:
    kept = Measurements(folder, {"model": "llama"}, again=again)
    options = replace(SMALL, **changes)
    found = tune(MODEL, RandomTokenizer(), CALIBRATION, options, TEXT, kept=kept).tuned
    assert found is not None
    return found


def test_another_target_takes_its_own_rounds_only(tmp_path: Path, counts: Counter[str]) -> None:
    _tune(tmp_path / "kept")
    assert counts["read"] == 1 and counts["_decode"] >= len(ALPHAS)
    counts.clear()
    reused = _tune(tmp_path / "kept", target_kl=0.4)
    assert counts["read"] == 0
    assert 0 < counts["_decode"] <= ROUNDS + 1  # and the window held back
    assert reused == _tune(None, target_kl=0.4)
    counts.clear()
    assert _tune(tmp_path / "kept", target_kl=0.4) == reused
    assert not counts


def test_an_interrupted_run_goes_on(
    tmp_path: Path, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _tune(None)
    needed = counts.copy()
    counts.clear()
    decode = Trials._decode

    def stop_at_the_seventh(*args: Any) -> Any:
        if counts["_decode"] == 7:
            raise KeyboardInterrupt
        return decode(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Trials, "_decode", stop_at_the_seventh)
        with pytest.raises(KeyboardInterrupt):
            _tune(tmp_path / "kept")
    assert _tune(tmp_path / "kept") == whole
    assert counts == needed


def test_what_is_damaged_is_measured_again(
    tmp_path: Path, counts: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    whole = _tune(tmp_path)
    cut, changed, foreign, *_ = sorted(tmp_path.glob("trial-*.json"))
    cut.write_bytes(cut.read_bytes()[:100])
    held = json.loads(changed.read_text())
    held["result"]["kl"] = 9.0
    changed.write_text(json.dumps(held))
    foreign.write_bytes(next(tmp_path.glob("harm-*.json")).read_bytes())
    counts.clear()
    with caplog.at_level(logging.WARNING):
        assert _tune(tmp_path) == whole
    assert counts == {"_decode": 3}
    assert len([each for each in caplog.messages if "measured again" in each]) == 3
    counts.clear()
    assert _tune(tmp_path) == whole
    assert not counts


def test_again_measures_anew_and_keeps_that(tmp_path: Path, counts: Counter[str]) -> None:
    _tune(tmp_path)
    needed = counts.copy()
    counts.clear()
    _tune(tmp_path, again=True)
    assert counts == needed
    counts.clear()
    _tune(tmp_path)
    assert not counts


@pytest.mark.parametrize(
    "changes", [{"resident": 0.3}, {"max_fetch": 0.5}, {"partial_ratio": 0.25}, {"codec": "int8"}]
)
def test_other_settings_are_measured(
    tmp_path: Path, counts: Counter[str], changes: dict[str, Any]
) -> None:
    _tune(tmp_path)
    counts.clear()
    _tune(tmp_path, **changes)
    assert counts["_decode"] >= len(ALPHAS)


def test_results_depend_on_model_calibration_and_type() -> None:
    other = TINY["llama"]().eval()
    with torch.no_grad():
        other.model.layers[-1].mlp.up_proj.weight.mul_(1.01)
    fine = replace(CALIBRATION, settings={**CALIBRATION.settings, "rank": 5})
    layer = CALIBRATION.layers[2]
    nudged = {**CALIBRATION.layers, 2: replace(layer, up=layer.up * 1.01)}
    found = [
        dependencies(MODEL, CALIBRATION),
        dependencies(other, CALIBRATION),
        dependencies(MODEL, fine),
        dependencies(MODEL, replace(CALIBRATION, layers=nudged)),
        dependencies(TINY["llama"]().to(torch.bfloat16), CALIBRATION),
    ]
    assert found[0] == dependencies(TINY["llama"]().eval(), CALIBRATION)
    assert len({json.dumps(each) for each in found}) == len(found)
    assert len({default_folder(each) for each in found}) == len(found)


def test_windows_differ_by_tokens_and_by_where_the_prompt_ends() -> None:
    ids = torch.arange(10)
    windows = [Window(ids[:6], ids[6:]), Window(ids[:5], ids[5:]), Window(ids[:6], ids[6:] + 1)]
    names = {
        Measurement("trial", window_digest(window)).key({"model": "a"}).file_name
        for window in windows
    }
    assert len(names) == 3


def test_only_the_user_may_read_them(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "where"
    Measurements(folder, {})
    assert folder.stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="cannot be written to"):
        Measurements(tmp_path / "file", {})


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PointStore, "put", full)
    kept = Measurements(tmp_path, {})
    found = [
        kept.of(Measurement("trial", {"at": at}), lambda: {"kl": 0.5}, lambda held: held["kl"])
        for at in range(3)
    ]
    assert found == [0.5] * 3
    assert len(caplog.messages) == 1 and "No space left" in caplog.messages[0]
