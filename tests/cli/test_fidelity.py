"""``infinigen-kv fidelity``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny
from command_line import TEXT, Run, last_json, refusal, tokenizer
from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv_lab.bench.fidelity import measure_fidelity

KEYS = {
    *("fetched_share", "kl_mean", "kl_p99", "top1_same", "ppl_full", "ppl", "recall_mean"),
    *("recall_by_layer", "fetched_by_layer", "coverage_mean", "seconds"),
    *("model", "config", "text", "skip_tokens", "prompt_tokens", "decode_tokens"),
}


def test_json_holds_what_the_library_measures(
    run: Run, model_folder: Path, artefact: Path, text_file: Path
) -> None:
    result = run(
        *("fidelity", model_folder, "--text", text_file, "--calibration", artefact, "--json"),
        *("--skip-tokens", 100, "--prompt-tokens", 300, "--decode-tokens", 40, "--alpha", 3),
    )
    found = last_json(result)
    assert found.keys() >= KEYS
    ids = torch.tensor(tokenizer()(TEXT)["input_ids"][100:440])
    config = InfiniGenConfig(alpha=3.0)
    expected = measure_fidelity(
        tiny.llama(), Calibration.load(artefact), config, ids, prompt_tokens=300
    )
    for key in ("fetched_share", "kl_mean", "ppl", "recall_mean"):
        assert found[key] == pytest.approx(getattr(expected, key), rel=1e-4), key
    assert found["fetched_by_layer"].keys() == {"0", "1", "2", "3"}
    assert found["config"]["alpha"] == 3.0
    assert result.stdout.count("\n") == 1


def test_table(run: Run, model_folder: Path, artefact: Path, text_file: Path) -> None:
    result = run(
        *("fidelity", model_folder, "--text", text_file, "--calibration", artefact),
        *("--prompt-tokens", 300, "--decode-tokens", 10, "--rehearsal", "paper"),
    )
    assert result.exit_code == 0
    assert "300 + 10" in result.stdout
    assert "fetched share" in result.stdout
    assert "paper rehearsal" in result.stdout


def test_docs_is_the_documentation_text(run: Run, model_folder: Path, artefact: Path) -> None:
    result = run(
        *("fidelity", model_folder, "--text", "docs", "--calibration", artefact, "--json"),
        *("--skip-tokens", 1000, "--prompt-tokens", 260, "--decode-tokens", 5),
    )
    assert last_json(result)["text"] == "docs"


def test_tokens_beyond_the_text(run: Run, model_folder: Path, text_file: Path) -> None:
    result = run(
        *("fidelity", model_folder, "--text", text_file, "--skip-tokens", 1000),
        *("--prompt-tokens", 400, "--decode-tokens", 101),
    )
    assert "1501 tokens, but the text has 1500" in refusal(result)


def test_tokens_beyond_the_model(run: Run, model_folder: Path, text_file: Path) -> None:
    words = ("--prompt-tokens", 500, "--decode-tokens", 13)
    result = run("fidelity", model_folder, "--text", text_file, *words)
    assert "513 tokens" in refusal(result)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--prompt-tokens", "0", "--decode-tokens", "5"), "'--prompt-tokens'"),
        (("--prompt-tokens", "5", "--decode-tokens", "-5"), "'--decode-tokens'"),
        (("--prompt-tokens", "5"), "--decode-tokens"),
        (("--prompt-tokens", "5", "--decode-tokens", "5", "--alpha", "nan"), "--alpha nan"),
    ],
)
def test_bad_options(run: Run, text_file: Path, words: tuple[str, ...], reason: str) -> None:
    assert reason in refusal(run("fidelity", "./no-model", "--text", text_file, *words))


def test_missing_text(run: Run) -> None:
    words = ("--prompt-tokens", 5, "--decode-tokens", 5)
    result = run("fidelity", "./no-model", "--text", "none.txt", *words)
    assert "--text none.txt: cannot be read (No such file or directory)" in refusal(result)
