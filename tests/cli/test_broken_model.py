"""A model whose output head is NaN: one line and exit status 2 instead of figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny
from command_line import Run, refusal, save

SAID = "the model's logits contain NaN or infinity"


@pytest.mark.parametrize("command", ["bench", "fidelity"])
def test_nan_is_refused(command: str, run: Run, text_file: Path, tmp_path: Path) -> None:
    model = tiny.llama()
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    words = ("--prompt-tokens", 60, "--decode-tokens", 2, "--min-context", 8)
    folder = save(model, tmp_path / "broken")
    reason = refusal(run(command, folder, "--text", text_file, *words))
    assert reason.startswith(f"infinigen-kv: {SAID}")


@pytest.mark.parametrize("part", ["lm_head", "model.layers.2.mlp.down_proj"])
@pytest.mark.parametrize("words", [("--full",), ("--min-context", 8)])
def test_generate_says_nothing_with_nan(
    part: str, words: tuple[object, ...], run: Run, artefact: Path, tmp_path: Path
) -> None:
    """A prompt of one token is too short for anything else to see it."""
    model = tiny.llama()
    with torch.no_grad():
        model.get_submodule(part).weight[5] = torch.nan
    folder = save(model, tmp_path / "broken")
    given = () if words == ("--full",) else ("--calibration", artefact)
    result = run("generate", folder, "--prompt", "A", "--max-new-tokens", 2, *words, *given)
    assert "contain NaN or infinity" in refusal(result)


def test_calibrate_refuses_nan_that_no_token_of_the_text_meets(
    run: Run, text_file: Path, tmp_path: Path
) -> None:
    model = tiny.llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[1] = torch.nan  # the start of a text, which it has none of
    folder = save(model, tmp_path / "broken")
    result = run("calibrate", folder, "--text", text_file, "--output", tmp_path / "made")
    assert "weights contain NaN or infinity (in embed_tokens.weight)" in refusal(result)
