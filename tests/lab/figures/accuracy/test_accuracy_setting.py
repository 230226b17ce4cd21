"""Names and sizes of the accuracy figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from accuracy_data import data_folder
from infinigen_kv import InputError
from infinigen_kv.policies.registry import POLICIES
from infinigen_kv_lab.evals.registry import TASKS
from infinigen_kv_lab.figures.accuracy.data import check_data_folder
from infinigen_kv_lab.figures.accuracy.setting import (
    FULL_SCALE,
    QUICK_SCALE,
    SHORTEST,
    AccuracySetting,
)
from infinigen_kv_lab.figures.catalogue import choose_figures, figures_of

PAPER = ["table-1", "4", "5", "7", "11", "12", "13", "table-2", "19", "20"]
OURS = ["passkey", "needles", "speculation", "codecs"]


def test_names() -> None:
    assert list(figures_of("accuracy")) == [*PAPER, *OURS]
    assert [each.name for each in choose_figures("accuracy", None)] == [*PAPER, *OURS]
    assert [each.name for each in choose_figures("accuracy", "passkey, 12,Table-1")] == [
        *("table-1", "12", "passkey")
    ]


@pytest.mark.parametrize(
    ("text", "hint"), [("paskey", "did you mean passkey?"), ("14", "there are table-1, 4, 5, 7")]
)
def test_unknown_names(text: str, hint: str) -> None:
    with pytest.raises(InputError, match=re.escape(hint)):
        choose_figures("accuracy", f"12,{text}")


@pytest.mark.parametrize("scale", [FULL_SCALE, QUICK_SCALE], ids=["full", "quick"])
@pytest.mark.parametrize("positions", [None, 8192, 2048, 512, SHORTEST])
def test_trials_fit_the_model(scale: object, positions: int | None) -> None:
    assert scale in (FULL_SCALE, QUICK_SCALE)
    made = (FULL_SCALE if scale is FULL_SCALE else QUICK_SCALE).within(positions)
    setting = AccuracySetting(scale=made, model="m")
    for figure in figures_of("accuracy").values():
        trials = figure.measurements(setting)
        assert trials and len(set(trials)) == len(trials)
        for trial in trials:
            options = trial.options
            assert trial.task in TASKS and set(trial.policies) <= set(POLICIES)
            if positions is not None:
                assert (options.window or 0) <= positions
                if trial.task in ("needles", "sparsity"):
                    assert max(options.lengths) <= positions
            if options.window is not None and options.prompt_tokens is not None:
                assert 0 < options.prompt_tokens < options.window - 1


def test_a_model_with_too_few_positions() -> None:
    with pytest.raises(InputError, match=f"at least {SHORTEST}"):
        QUICK_SCALE.within(SHORTEST - 1)


def test_another_number_of_windows() -> None:
    scale = FULL_SCALE.with_windows(3)
    assert {scale.text.windows, scale.sweep.windows, scale.stepwise.windows, scale.looks} == {3}
    assert FULL_SCALE.with_windows(None) is FULL_SCALE


def test_a_data_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder: fetch what you need of wikitext2/wiki"):
        check_data_folder(tmp_path / "none")
    with pytest.raises(InputError, match="holds none of the files"):
        check_data_folder(tmp_path)
    check_data_folder(data_folder(tmp_path / "data"))
