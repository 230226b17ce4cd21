"""``bench --budget`` and policies that are named wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import Run, last_json, refusal


@pytest.mark.parametrize("given", ["0", "0%", "1.5", "150%", "20", "abc", "-1", "nan", ""])
def test_budgets_that_are_refused_before_a_model_is_loaded(run: Run, given: str) -> None:
    reason = refusal(run("bench", "no/such/model", f"--budget={given}"))
    assert f"--budget {given!r} is not valid" in reason and "(0, 1]" in reason


@pytest.mark.parametrize(("given", "share"), [("50%", 0.5), ("0.25", 0.25), ("1.0", 1.0)])
def test_a_budget_is_what_policies_fetch(
    run: Run, model_folder: Path, artefact: Path, text_file: Path, given: str, share: float
) -> None:
    result = last_json(
        run(
            *("bench", model_folder, "--calibration", artefact, "--text", text_file),
            *("--prompt-tokens", "100", "--decode-tokens", "2", "--min-context", "8"),
            *("--link", "emulated:1000", "--policies", "h2o,quest,paging"),
            *("--budget", given, "--json"),
        )
    )
    assert result["budget"] == share
    figures = {each["policy"]: each for each in result["policies"]}
    for policy in ("h2o", "quest"):
        assert figures[policy]["fetched_share"] == pytest.approx(share, abs=0.01)
    assert figures["paging"]["fetched_share"] == 1
    assert figures["paging"]["kl_to_ideal"] == pytest.approx(0, abs=1e-6)
    if share == 1:
        assert figures["h2o"]["kl_to_ideal"] == pytest.approx(0, abs=1e-6)


def test_a_wrong_name_gets_the_near_ones(run: Run) -> None:
    reason = refusal(run("bench", "no/such/model", "--policies", "ideal,infinigen-papers"))
    assert "policy='infinigen-papers' is not valid: did you mean infinigen-paper" in reason
