"""What a cache that was cropped still knows of what it forgot: KL to full attention.

    python benchmarks/crop.py MODEL --text novel.txt --other-text another.txt

A cache reads a prefix, then in each round some other text, is cropped to the prefix and in the end
reads a question and the text after it, token by token. Beside it a cache that has read nothing
else. `cropped_from_fresh` is the KL between these two. One JSON object on stdout.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinigen_kv import InfiniGenConfig, attach, calibrate, load_model
from infinigen_kv.cache.forward import forward, prefill


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--other-text", type=Path, required=True)
    parser.add_argument("--rehearsal", choices=["calibrated", "paper"], default="calibrated")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prefix", type=int, default=700)
    parser.add_argument("--other", type=int, default=1000, help="tokens of other text in a round")
    parser.add_argument("--other-steps", type=int, default=32, help="of these one by one")
    parser.add_argument("--question", type=int, default=400)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--skip", type=int, default=20_000, help="characters of each text")
    parser.add_argument(
        "--inside", type=int, default=0, help="tokens of the other text read with the prefix"
    )
    given = parser.parse_args()
    loaded = load_model(given.model, dtype=getattr(torch, given.dtype))

    def encode(path: Path) -> Tensor:
        text = path.read_text(encoding="utf-8")[given.skip :]
        return torch.tensor([loaded.tokenizer(text[:200_000], verbose=False)["input_ids"]])

    ids, other = encode(given.text), encode(given.other_text)
    prompt = given.prefix + given.question
    ids = ids[:, : prompt + given.steps]
    with torch.no_grad():
        logits = loaded.model(input_ids=ids, use_cache=False).logits
    exact = logits[0, prompt:].float().log_softmax(-1)
    calibration = calibrate(loaded.model, loaded.tokenizer)
    found: dict[str, Any] = {**vars(given), "text": given.text.name}
    found["other_text"] = given.other_text.name
    config = InfiniGenConfig(rehearsal=given.rehearsal)
    with attach(loaded.model, calibration, config) as session:

        def answer(rounds: int) -> Tensor:
            cache = session.new_cache(tokens=prompt + given.steps)
            first = ids[:, : given.prefix]
            if given.inside:
                first = torch.cat([first, other[:, : given.inside]], dim=1) if rounds else first
            prefill(session, cache, first)
            for number in range(rounds):
                start = number * given.other
                piece = other[:, start : start + given.other]
                prefill(session, cache, piece[:, : given.other - given.other_steps])
                for token in piece[:, given.other - given.other_steps :].split(1, dim=1):
                    forward(session.model, token, cache)
                cache.crop(given.prefix)
            prefill(session, cache, ids[:, given.prefix : prompt])
            steps = [
                forward(session.model, token, cache) for token in ids[:, prompt:].split(1, dim=1)
            ]
            return torch.cat(steps, dim=1)[0].float().log_softmax(-1)

        fresh = answer(0)
        found["fresh"] = _kl(exact, fresh)
        for rounds in given.rounds:
            cropped = answer(rounds)
            found[f"rounds_{rounds}"] = {
                "kl": _kl(exact, cropped),
                "cropped_from_fresh": _kl(fresh, cropped),
                "largest_difference": (fresh - cropped).abs().max().item(),
            }
    print(json.dumps(found))


def _kl(reference: Tensor, ours: Tensor) -> float:
    return (reference.exp() * (reference - ours)).sum(-1).mean().item()


if __name__ == "__main__":
    main()
