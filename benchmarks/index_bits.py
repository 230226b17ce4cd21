"""Time of one layer's selection and attention with the tail, by how partial keys are kept.

    python benchmarks/index_bits.py --tokens 4096 --heads 9 --kv-heads 3

Random numbers, one thread; a tenth of the tokens is attended to under every index, so that what is
compared is the reading of the partial keys. Prints microseconds, the least of many.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from infinigen_kv import InfiniGenConfig
from infinigen_kv.attention.entries import Entries
from infinigen_kv.kernels.native.kernels import NativeKernels
from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.coded_partial_keys import make_partial_keys
from infinigen_kv.rehearsal.statistics import Moments
from infinigen_kv.rehearsal.tail import Tail, ValueMap

DIM = 64
INDEXES: dict[str, dict[str, float | str]] = {
    "24 dimensions of 16 bits": {"partial_ratio": 0.375},
    "48 dimensions of 16 bits": {"partial_ratio": 0.75},
    **{bits: {"index_bits": bits} for bits in ("3x16+2x32", "4x32", "3x48", "2x48")},
}


def least(work: Callable[[], object], repeats: int) -> float:
    """Microseconds."""
    found = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        found = min(found, time.perf_counter() - started)
    return found * 1e6


def measure(
    config: InfiniGenConfig, query: Tensor, keys: Tensor, values: Tensor, repeats: int
) -> tuple[float, float, float]:
    """Bytes a token and KV head, and the times of selection and attention."""
    tokens = keys.shape[2]
    moments = Moments.start(keys, values)
    moments.observe(query, keys, torch.arange(tokens)[None], None, values)
    projection = moments.projection(config.partial_dim(DIM))
    partial = make_partial_keys(config, keys, projection)
    step = Step(
        start=tokens, queries=1, rows=1, visible=None, position_ids=torch.tensor([[tokens]]),
        selecting=True, config=config,
    )  # fmt: skip
    kernels, last = NativeKernels(), query[:, :, -1:]
    scaling = DIM**-0.5

    def choose() -> Tensor:
        candidates = step.candidates
        return kernels.select(
            last, partial, candidates, scaling=scaling, alpha=100.0, softcap=None
        ).index.squeeze(2)

    index = choose()
    tail = Tail(partial, ValueMap.fit(projection, moments), index, None, None)
    entries, own = Entries(keys, values, index), (keys[:, :, -1:], values[:, :, -1:])

    def attend() -> object:
        return kernels.attend(last, entries, None, *own, scaling=scaling, softcap=None, tail=tail)

    bytes_each = partial.nbytes / (keys.shape[1] * tokens)
    return bytes_each, least(choose, repeats), least(attend, repeats)


def main() -> None:
    """Print a line for each index."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=200)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mixing = torch.randn(given.kv_heads, DIM, DIM) / 8
    keys = (torch.randn(1, given.kv_heads, given.tokens, DIM) @ mixing).bfloat16()
    values = torch.randn(1, given.kv_heads, given.tokens, DIM).bfloat16()
    query = torch.randn(1, given.heads, given.tokens, DIM).bfloat16()
    for name, settings in INDEXES.items():
        config = InfiniGenConfig(max_fetch=0.1, **settings)  # type: ignore[arg-type]
        size, choosing, attending = measure(config, query, keys, values, given.repeats)
        print(f"{name:26} {size:6.1f} bytes, selection {choosing:5.0f}, attention {attending:5.0f}")


if __name__ == "__main__":
    main()
