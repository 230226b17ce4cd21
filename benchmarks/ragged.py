"""Rows of different lengths that join and leave one batch, against the same requests one by one.

    python benchmarks/ragged.py [--requests 12] [--rows 8] [--shortest 500] [--longest 6000]
        [--fewest-new 32] [--most-new 128] [--dtype bfloat16] [--policy infinigen]
    python benchmarks/ragged.py --served 500

The first form decodes the same requests in a batch and one after the other, in one process, and
compares speed and tokens. The second serves many short requests and watches memory and files. A
table goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinigen_kv import Calibration, Session, attach, calibrate, load_model
from infinigen_kv.batching.batch import InfiniGenBatch
from infinigen_kv.batching.row import Row
from infinigen_kv.batching.scheduling import Request, run_requests
from infinigen_kv.cache.forward import forward, prefill
from infinigen_kv.calibration.texts import documentation_text
from infinigen_kv.models.loading import LoadedModel

WATCHED = 50  # requests between two looks at the memory
SHORT = range(16, 65)  # tokens of a short prompt
DTYPES = ("bfloat16", "float32")


@dataclass
class Phases:
    """Seconds of prompts and of decode steps, and tokens that came out of the latter."""

    prompts: float = 0.0
    steps: float = 0.0
    decoded: int = 0

    def summary(self, tokens: int) -> dict[str, float]:
        """With ``tokens`` in all, those of the prompts' last positions included."""
        return {
            "prompt_seconds": self.prompts,
            "step_seconds": self.steps,
            "tokens_per_second_decode": self.decoded / self.steps,
            "tokens_per_second_whole": tokens / (self.prompts + self.steps),
        }


class TimedBatch:
    """A batch as `run_requests` uses it, with a clock."""

    def __init__(self, batch: InfiniGenBatch) -> None:
        self._batch = batch
        self.phases = Phases()
        self.release = batch.release

    @property
    def free(self) -> int:
        """Rows that may join."""
        return self._batch.free

    def join(self, *given: Any, **options: Any) -> Row:
        """See `InfiniGenBatch.join`."""
        started = time.perf_counter()
        row = self._batch.join(*given, **options)
        self.phases.prompts += time.perf_counter() - started
        return row

    def step(self, tokens: dict[Row, int]) -> Tensor:
        """See `InfiniGenBatch.step`."""
        started = time.perf_counter()
        logits = self._batch.step(tokens)
        self.phases.steps += time.perf_counter() - started
        self.phases.decoded += len(tokens)
        return logits


@dataclass(frozen=True)
class Continuation:
    """New tokens of a single run, and by how much each led over the second best."""

    token_ids: list[int]
    leads: list[float]


@torch.no_grad()
def alone(session: Session, request: Request, policy: str, phases: Phases) -> Continuation:
    """A request in a cache of its own, greedily."""
    ids = torch.as_tensor(request.prompt_ids)[None]
    cache = session.new_cache(tokens=request.tokens, policy=policy)
    started = time.perf_counter()
    logits = prefill(session, cache, ids)
    phases.prompts += time.perf_counter() - started
    found, leads = [], []
    while True:
        last = logits[0, -1]
        best = last.float().topk(2).values
        found.append(int(last.argmax()))
        leads.append(float(best[0] - best[1]))
        if len(found) == request.max_new_tokens:
            cache.close()
            return Continuation(found, leads)
        started = time.perf_counter()
        logits = forward(session.model, torch.tensor([found[-1:]]), cache)
        phases.steps += time.perf_counter() - started
        phases.decoded += 1


def spread_requests(loaded: LoadedModel, options: argparse.Namespace) -> list[Request]:
    """Prompts of evenly spread lengths, in random order, from a text."""
    chance = random.Random(options.seed)
    text = documentation_text()[: 10 * options.longest + 20_000]
    ids = loaded.tokenizer(text, verbose=False)["input_ids"]
    count = options.requests
    reach = options.longest - options.shortest
    lengths = [options.shortest + reach * at // max(1, count - 1) for at in range(count)]
    chance.shuffle(lengths)
    made = []
    for length in lengths:
        start = chance.randrange(max(1, len(ids) - length))
        new = chance.randint(options.fewest_new, options.most_new)
        made.append(Request(ids[start : start + length], max_new_tokens=new))
    return made


def difference(batched: list[int], single: Continuation) -> dict[str, float] | None:
    """Where the tokens part, and by how much the single run's token led there."""
    for at, (one, other) in enumerate(zip(batched, single.token_ids, strict=True)):
        if one != other:
            return {"token": at, "lead": single.leads[at]}
    return None


def compare(session: Session, requests: list[Request], options: argparse.Namespace) -> Any:
    """The requests together, one after the other in caches of their own, and each alone in a batch.

    A product of matrices rounds by how many rows it has, so in bfloat16 a run in a cache of its own
    may choose the other of two best tokens that are as good as equal. Alone in a batch of as many
    places, which are padding, everything is computed alike.
    """
    settings = {
        "rows": options.rows,
        "tokens": max(request.tokens for request in requests),
        "policy": options.policy,
    }
    warm_up = [Request(list(request.prompt_ids)[:64], max_new_tokens=4) for request in requests[:2]]
    with session.new_batch(**settings) as batch:
        dict(run_requests(batch, warm_up))
        timed: Any = TimedBatch(batch)
        batched = dict(run_requests(timed, requests))
        alike = [dict(run_requests(batch, [request]))[0] for request in requests]
    phases = Phases()
    alone(session, warm_up[0], options.policy, Phases())
    singles = [alone(session, request, options.policy, phases) for request in requests]
    parted = {
        number: found
        for number, each in enumerate(singles)
        if (found := difference(batched[number], each)) is not None
    }
    new = sum(request.max_new_tokens for request in requests)
    together, apart = timed.phases.summary(new), phases.summary(new)
    result = {
        "prompt_tokens": [request.prompt_tokens for request in requests],
        "new_tokens": [request.max_new_tokens for request in requests],
        "batched": together,
        "one_by_one": apart,
        "speed_up": {
            kind: together[f"tokens_per_second_{kind}"] / apart[f"tokens_per_second_{kind}"]
            for kind in ("decode", "whole")
        },
        "rows_equal_alone_in_the_batch": sum(
            batched[number] == each for number, each in enumerate(alike)
        ),
        "rows_equal_in_own_cache": len(requests) - len(parted),
        "parted": parted,
    }
    report(result, options)
    return result


def report(result: dict[str, Any], options: argparse.Namespace) -> None:
    """The comparison, for people."""
    count, together, apart = options.requests, result["batched"], result["one_by_one"]
    print(
        f"{count} requests, {options.rows} rows: batched "
        f"{together['tokens_per_second_decode']:.1f} tokens/s decoding, one by one "
        f"{apart['tokens_per_second_decode']:.1f}: {result['speed_up']['decode']:.2f} x (with "
        f"prompts {result['speed_up']['whole']:.2f} x)\n"
        f"same tokens as alone in the batch: {result['rows_equal_alone_in_the_batch']} of {count} "
        f"rows; as in a cache of its own: {result['rows_equal_in_own_cache']} of {count}",
        file=sys.stderr,
    )
    for number, each in result["parted"].items():
        print(
            f"  request {number} parts from its own cache at token {each['token']}, where the best "
            f"led by {each['lead']:.4f}",
            file=sys.stderr,
        )


def memory() -> dict[str, int]:
    """Resident bytes, open files and threads of this process (Linux)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "rss_bytes": int(fields["VmRSS"].split()[0]) * 1024,
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": int(fields["Threads"]),
    }


def serve(session: Session, loaded: LoadedModel, options: argparse.Namespace) -> Any:
    """Many short requests, one batch after the other; what the process holds on the way.

    The first `WATCHED` meet every length of a prompt: in bfloat16 oneDNN keeps a compiled kernel
    for each that it has met.
    """
    chance = random.Random(options.seed)
    lengths = itertools.cycle(chance.sample(SHORT, len(SHORT)))
    known = len(loaded.tokenizer)
    seen: dict[int, dict[str, int]] = {}
    for first in range(0, options.served, WATCHED):
        requests = [
            Request(
                [chance.randrange(known) for _ in range(next(lengths))],
                max_new_tokens=chance.randint(4, 12),
            )
            for _ in range(min(WATCHED, options.served - first))
        ]
        with session.new_batch(rows=options.rows, tokens=128, policy=options.policy) as batch:
            done = sum(1 for _ in run_requests(batch, requests))
        gc.collect()
        seen[first + done] = memory()
        print(f"after {first + done} requests: {seen[first + done]}", file=sys.stderr)
    return {"after_requests": seen}


def run(loaded: LoadedModel, calibration: Calibration, options: argparse.Namespace) -> Any:
    """What was asked for."""
    with attach(loaded.model, calibration) as session:
        if options.served:
            return serve(session, loaded, options)
        return compare(session, spread_requests(loaded, options), options)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--shortest", type=int, default=500)
    parser.add_argument("--longest", type=int, default=6000)
    parser.add_argument("--fewest-new", type=int, default=32)
    parser.add_argument("--most-new", type=int, default=128)
    parser.add_argument("--served", type=int, default=0)
    parser.add_argument("--policy", default="infinigen")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    loaded = load_model("smollm2", dtype=getattr(torch, options.dtype))
    result = run(loaded, calibrate(loaded.model, loaded.tokenizer), options)
    settings = {
        "model": "smollm2",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    print(json.dumps({**vars(options), **settings, **result}))


if __name__ == "__main__":
    main()
