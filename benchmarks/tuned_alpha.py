"""What alphas tuned by layer move on a text of their own, beside one alpha for all layers.

    infinigen-kv tune MODEL --calibration DIR
    python benchmarks/tuned_alpha.py MODEL --calibration DIR --text novel.txt

Single alphas are tried from `--lowest` on in steps of `--step` until their KL is below the tuned
one's; bytes at the same KL are interpolated between the last two, by logarithms. The link counts
bytes and keeps nobody waiting. One JSON object on stdout.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from infinigen_kv import Calibration, load_model
from infinigen_kv_lab.tuning.options import TuneOptions
from infinigen_kv_lab.tuning.trial import Trial, Trials
from infinigen_kv_lab.tuning.windows import split_windows

MOST = 16  # single alphas that are tried


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--lowest", type=float, default=3.5)
    parser.add_argument("--step", type=float, default=0.5)
    given = parser.parse_args()
    made = Calibration.load(given.calibration)
    if made.tuned is None:
        parser.error(f"{given.calibration} holds no tuned settings: run `infinigen-kv tune` first")
    loaded = load_model(given.model, dtype=getattr(torch, given.dtype))
    options = TuneOptions(
        max_fetch=made.tuned.max_fetch,
        partial_ratio=made.tuned.partial_ratio,
        resident=made.tuned.resident,
        resident_layers=made.tuned.resident_layers,
        prompt_tokens=given.prompt_tokens,
        windows=given.windows,
    )
    windows, _ = split_windows(
        loaded.tokenizer,
        [given.text.read_text(encoding="utf-8")],
        prompt_tokens=options.prompt_tokens,
        decode_tokens=options.decode_tokens,
        count=options.windows,
        device=loaded.model.device,
    )
    trials = Trials(loaded.model, replace(made, tuned=None), windows)
    tuned = trials.measure(options.config(made.tuned.alpha), options.storage)
    singles: list[tuple[float, Trial]] = []
    for number in range(MOST):
        alpha = given.lowest + number * given.step
        singles.append((alpha, trials.measure(options.config(alpha), options.storage)))
        if singles[-1][1].kl < tuned.kl:
            break
    moved = _at(tuned.kl, [each for _, each in singles[-2:]])
    found: dict[str, Any] = {
        "text": given.text.name,
        "windows": len(windows),
        "tuned": asdict(tuned),
        "singles": [{"alpha": alpha, **asdict(each)} for alpha, each in singles],
        "single_bytes_at_equal_kl": moved,
        "bytes_saved": 1 - tuned.link_bytes / moved,
    }
    print(json.dumps(found))


def _at(kl: float, ends: list[Trial]) -> float:
    """Link bytes at a KL, between two trials; NaN where it lies outside."""
    if len(ends) < 2 or not ends[1].kl <= kl <= ends[0].kl:
        return math.nan
    first, last = ends
    part = math.log(kl / first.kl) / math.log(last.kl / first.kl)
    return first.link_bytes * (last.link_bytes / first.link_bytes) ** part


if __name__ == "__main__":
    main()
