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
