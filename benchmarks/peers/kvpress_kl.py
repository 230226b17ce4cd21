"""KL of kvpress's presses on our prompt; runs in an environment with kvpress.

    python benchmarks/peers/kvpress_kl.py --prompt OUT/prompt.json --output kvpress.json
        [--model FOLDER] [--keep 0.05,0.1,0.2,0.4] [--duo-scores FILE.tsv]

Same definition as `infinigen_kv_lab.bench.run`: the prompt is read once, then every system is fed
what the full cache generates, from the prompt's last token on; the KL(full || press) of the
next-token distributions is averaged over the measured steps. A press keeps its cache on the device;
its bytes per token are those of the surviving entries, as if they crossed a link each step.

DuoAttention needs scores of the heads (layers x KV heads, tab-separated), which exist for a few
large models only: without --duo-scores it is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

FORMAT = "infinigen-kv peers 1"
PRESSES: dict[str, Callable[[float], Any]] = {
    "SnapKV": lambda drop: kvpress.SnapKVPress(compression_ratio=drop),
    "KeyDiff": lambda drop: kvpress.KeyDiffPress(compression_ratio=drop),
    "ExpectedAttention": lambda drop: kvpress.ExpectedAttentionPress(compression_ratio=drop),
    "StreamingLLM": lambda drop: kvpress.StreamingLLMPress(compression_ratio=drop),
}


def duo_attention(scores: Any) -> Callable[[float], Any]:
    """DuoAttention with scores from a file; its sinks and window as published."""

    class FromFile(kvpress.DuoAttentionPress):
        @staticmethod
        def load_attention_pattern(model: Any) -> tuple[int, int, Any]:
            return 128, 256, scores

    return lambda drop: FromFile(head_compression_ratio=drop)


class Run:
    """One cache, fed token by token at the positions that follow the prompt."""

    def __init__(self, model: Any, prompt: Tensor, press: Any = None) -> None:
        self._model = model
        self._length = prompt.shape[1]
        self._cache = DynamicCache()
        if press is None:
            self._read(prompt)
        else:
            with press(model):
                self._read(prompt)
        self._press = press

    def _read(self, prompt: Tensor) -> None:
        self._model(prompt, past_key_values=self._cache, logits_to_keep=1)

    @property
    def nbytes(self) -> float:
        """Bytes that a decode step attends to."""
        total = sum(layer.keys.nbytes + layer.values.nbytes for layer in self._cache.layers)
        masked = getattr(self._press, "compression_ratio_", None)  # masked instead of removed
        return float(total) if masked is None else total * (1 - masked)

    def step(self, token: Tensor) -> Tensor:
        """Log-probabilities ``(V,)`` after a token ``(1, 1)``."""
        position = torch.tensor([[self._length]], device=token.device)
        logits = self._model(
            token, past_key_values=self._cache, position_ids=position, logits_to_keep=1
        ).logits
        self._length += 1
        return logits[0, -1].float().log_softmax(-1)


def reference(model: Any, prompt: Tensor, steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens that all are fed, and the full cache's log-probabilities."""
    run = Run(model, prompt)
    token = prompt[:, -1:]
    fed, scores = [], []
    for _ in range(steps):
        fed.append(token)
        scores.append(run.step(token))
        token = scores[-1].argmax()[None, None]
    return fed, scores


def measure(
    model: Any, prompt: Tensor, press: Any, fed: list[Tensor], full: list[Tensor], warm_up: int
) -> dict[str, float]:
    """KL and bytes of one press."""
    run = Run(model, prompt, press)
    divergences, sizes = [], []
    for token, expected in zip(fed, full, strict=True):
        sizes.append(run.nbytes)
        found = run.step(token)
        divergences.append(float((expected.exp() * (expected - found)).sum()))
    return {
        "link_bytes_per_token": float(np.mean(sizes[warm_up:])),
        "kl_to_ideal": float(np.mean(divergences[warm_up:])),
    }


@torch.no_grad()
def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prompt", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", help="Folder or name; the one in the prompt's file by default.")
    parser.add_argument("--keep", default="0.05,0.1,0.2,0.4")
    parser.add_argument("--duo-scores", type=Path)
    options = parser.parse_args()
    given = json.loads(options.prompt.read_text(encoding="utf-8"))
    ids = given["token_ids"]
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
    if digest != given["prompt_sha256"]:
        raise SystemExit(f"{options.prompt}: its token_ids are not those that it names")
    presses = dict(PRESSES)
    if options.duo_scores is not None:
        presses["DuoAttention"] = duo_attention(np.loadtxt(options.duo_scores, delimiter="\t"))
    else:
        print("DuoAttention is left out: no --duo-scores", file=sys.stderr)
    dtype = getattr(torch, given["dtype"])
    disable_progress_bar()
    name = options.model or given["model_folder"]
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
    prompt = torch.tensor([ids])
    warm_up, steps = given["warm_up_tokens"], given["decode_tokens"]
    fed, full = reference(model, prompt, warm_up + steps)
    points = []
    for system, make in presses.items():
        for keep in (float(part) for part in options.keep.split(",")):
            found = measure(model, prompt, make(1 - keep), fed, full, warm_up)
            points.append({"system": f"{system} (kvpress)", "setting": f"keep {keep:g}", **found})
            print(f"{system}, keep {keep:g}: KL {found['kl_to_ideal']:.4f}", file=sys.stderr)
    result = {
        "format": FORMAT,
        "source": f"kvpress {version('kvpress')}, Transformers {version('transformers')}",
        "settings": {
            "model": given["model"],
            "dtype": given["dtype"],
            "prompt_sha256": digest,
            "warm_up_tokens": warm_up,
            "decode_tokens": steps,
        },
        "points": points,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
