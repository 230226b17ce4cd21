"""Whether everything is right and fast on this machine's CUDA device; under 8 minutes, no network.

    python benchmarks/gpu_check.py [--prompt-tokens 4096] [--steps 48] [--no-bench]

Checks first, with tiny random models, then decode speed of SmolLM2 over the real bus. Lines go to
stderr, one JSON object to stdout last. Exit status: 0 all right, 1 a check failed, 2 no device.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from infinigen_kv import InfiniGenConfig, attach, calibrate, load_model
from infinigen_kv.cache.forward import cache_argument, forward
from infinigen_kv.calibration.texts import documentation_text
from infinigen_kv.models.loading import EMBEDDED_PACKAGE
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv.storage.homes.pinned import HostMemory, pinned
from infinigen_kv.storage.homes.store import RamStore
from infinigen_kv.storage.link.cuda import CudaStore
from infinigen_kv.storage.link.lane import Gather, Lane
from infinigen_kv_lab.bench.run import bench

PROMPT, STEPS, ROWS = 300, 40, 2
HAS_TRITON = importlib.util.find_spec("triton") is not None
GATHERS: tuple[Gather, ...] = ("host", "device") if HAS_TRITON else ("host",)
POLICIES = ("ideal", "stream", "infinigen-paper", "infinigen")


def say(text: str) -> None:
    """A line for people."""
    print(text, file=sys.stderr, flush=True)


class _RandomTokenizer:
    """Gives every text random ids, as many as it has characters."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        generator = torch.Generator().manual_seed(len(text))
        return {"input_ids": torch.randint(3, 200, (len(text),), generator=generator).tolist()}


class TinyModel:
    """A random Llama on the device, its calibration, and tokens for it."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=200,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            initializer_range=0.2,
        )
        self.model = LlamaForCausalLM(config).eval().to(device)
        texts = ["x" * 3000, "y" * 2000]
        self.calibration = calibrate(
            self.model, _RandomTokenizer(), texts, tokens=5000, window=250, rank=8, use_cache=False
        )
        self.ids = torch.randint(3, 200, (ROWS, PROMPT + STEPS), device=device)

    @torch.no_grad()
    def logits(self, cache: Any) -> Tensor:
        """Logits ``(B, T, V)``: the prompt at once, then token by token."""
        pieces = [slice(0, PROMPT), *(slice(at, at + 1) for at in range(PROMPT, PROMPT + STEPS))]
        found = []
        for piece in pieces:
            arguments = {cache_argument(self.model): cache, "use_cache": True}
            found.append(self.model(input_ids=self.ids[:, piece], **arguments).logits)
        return torch.cat(found, dim=1)

    def cached(self, config: InfiniGenConfig, policy: str = "infinigen", **storage: Any) -> Tensor:
        """`logits` with a cache of ours."""
        settings = StorageConfig(**{"resident_layers": (), **storage})
        with attach(self.model, self.calibration, config, settings) as session:
            cache = session.new_cache(policy=policy, tokens=PROMPT + STEPS)
            try:
                return self.logits(cache)
            finally:
                cache.close()


def covering() -> InfiniGenConfig:
    """Selects, and selects everything."""
    return InfiniGenConfig(alpha=1e6, max_fetch=1.0, min_context=1)


def selecting() -> InfiniGenConfig:
    """Selects a part of a short context."""
    return InfiniGenConfig(alpha=2.0, max_fetch=0.2, min_context=16, recent_tokens=4)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-3) -> str:
    """Raise unless equal up to rounding; the largest difference."""
    largest = (actual - expected).abs().max().item()
    assert actual.isfinite().all() and largest <= tolerance, f"differ by {largest}"
    return f"largest difference {largest:.1e}"


def same(actual: Tensor, expected: Tensor) -> None:
    """Raise unless equal bit for bit."""
    largest = (actual - expected).abs().max().item()
    assert torch.equal(actual, expected), f"differ by {largest}"


# The checks. Each raises, or returns a remark.


def check_fetch_all(tiny: TinyModel) -> str:
    """Selecting everything equals Transformers' DynamicCache, wherever the KV lives."""
    expected = tiny.logits(DynamicCache(config=tiny.model.config))
    close(tiny.cached(covering(), home="device"), expected)
    close(tiny.cached(covering(), policy="stream"), expected)
    return close(tiny.cached(covering(), resident=0), expected)


def check_links(tiny: TinyModel) -> str:
    """Host gather, device gather, pageable memory and residents equal each other, bit for bit."""
    expected = tiny.cached(selecting(), resident=0, gather="host")
    remark = close(tiny.cached(selecting(), home="device"), expected, 0.05)
    for gather in GATHERS:
        for resident in (0, 0.1, 0.5):
            for _ in range(2):
                same(tiny.cached(selecting(), gather=gather, resident=resident), expected)
    same(tiny.cached(selecting(), resident=0.5, pinned_bytes=0), expected)
    same(tiny.cached(selecting(), resident=0, link="emulated:100,5"), expected)
    return f"against the home on the device: {remark}"


def check_homes(tiny: TinyModel) -> str:
    """A disk home equals one in RAM; codecs and capacities work, whoever gathers."""
    with tempfile.TemporaryDirectory() as folder:
        expected = tiny.cached(selecting(), resident=0.3)
        same(tiny.cached(selecting(), resident=0.3, home="disk", home_dir=Path(folder)), expected)
        assert not list(Path(folder).iterdir()), "the file is still there"
    for changes in ({"codec": "int8"}, {"codec": "int4"}, {"capacity": 0.9}, {"capacity": 200}):
        runs = [tiny.cached(selecting(), resident=0.3, gather=each, **changes) for each in GATHERS]
        for each in runs:
            assert each.isfinite().all()
            same(each, runs[0])
    return ""


def check_store(device: torch.device) -> str:
    """Random operations on a store behind a lane equal those on a plain one."""
    shape = (2, 3, 64)
    for gather in GATHERS:
        plain = RamStore(*shape)
        store = CudaStore(RamStore(*shape, 0, HostMemory(2**30)), Lane.on(device, gather))
        generator = torch.Generator().manual_seed(1)

        def below(limit: int, generator: torch.Generator = generator) -> int:
            return int(torch.randint(0, limit, (), generator=generator))

        expected: list[tuple[Any, Tensor]] = []
        for _ in range(400):
            new = torch.randint(0, 256, (2, 3, 1 + below(300), 64), dtype=torch.uint8)
            plain.append(new)
            store.append(new.to(device))
            slots = torch.randint(0, plain.length, (2, 3, 1 + below(500)))
            expected.append((store.start_read(slots.to(device)), plain.read(slots)))
            if below(5) == 0:
                expected.append((store.start_read_all(), plain.read_all().clone()))
            if below(4) == 0:
                keep = below(plain.length + 1)
                plain.truncate(keep)
                store.truncate(keep)
            if below(3) == 0 or not plain.length:
                for pending, wanted in expected:
                    assert torch.equal(pending.wait().cpu(), wanted), gather
                expected = []
        store.close()
    return ""


def check_triton(device: torch.device) -> str:
    """The kernel equals `index_select`; how fast it and the bus are."""
    if not HAS_TRITON:
        return "skipped: triton is not installed"
    from infinigen_kv.storage.link.triton_gather import gather_rows

    remarks = []
    for width in (6, 100, 256, 1024):
        source = pinned((100_000, width), torch.uint8)
        assert source is not None, "cannot pin memory"
        source.random_(0, 256)
        index = torch.randint(0, 100_000, (20_000,), device=device)
        target = torch.empty(20_000, width, dtype=torch.uint8, device=device)
        gather_rows(source, index, target)
        same(target.cpu().int(), source[index.cpu()].int())
        seconds = timed(lambda s=source, i=index, t=target: gather_rows(s, i, t))
        remarks.append(f"{width} B rows {target.nbytes / seconds / 1e9:.1f} GB/s")
    return ", ".join(remarks)


def timed(call: Callable[[], Any]) -> float:
    """Median seconds of a call, the device's work included."""
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def bus_rate(device: torch.device) -> float | None:
    """Bytes per second of a copy of 256 MiB from pinned memory; None where it cannot be pinned."""
    source = pinned((2**28,), torch.uint8)
    if source is None:
        return None
    target = torch.empty(2**28, dtype=torch.uint8, device=device)
    return source.nbytes / timed(lambda: target.copy_(source, non_blocking=True))


def run_checks(device: torch.device) -> dict[str, str]:
    """What each check said; a failed one's begins with ``FAILED``."""
    tiny = TinyModel(device)
    checks: dict[str, Callable[[], str]] = {
        "store": lambda: check_store(device),
        "triton gather": lambda: check_triton(device),
        "fetch all": lambda: check_fetch_all(tiny),
        "links": lambda: check_links(tiny),
        "homes": lambda: check_homes(tiny),
    }
    said = {}
    for name, check in checks.items():
        started = time.perf_counter()
        try:
            said[name] = check() or "equal"
        # one failed check must not hide what the others say
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            said[name] = f"FAILED: {type(error).__name__}: {error}"
        say(f"{name:14} {said[name]} ({time.perf_counter() - started:.1f} s)")
    return said


@torch.no_grad()
def run_bench(device: torch.device, prompt_tokens: int, steps: int) -> dict[str, Any]:
    """Decode speed of SmolLM2 in bfloat16 with the home in this machine's RAM."""
    if importlib.util.find_spec(EMBEDDED_PACKAGE) is None:
        return {"skipped": f"{EMBEDDED_PACKAGE} is not installed"}
    loaded = load_model("smollm2", dtype=torch.bfloat16, device=str(device))
    calibration = calibrate(loaded.model, loaded.tokenizer, use_cache=False)
    ids = loaded.tokenizer(documentation_text()[: 8 * prompt_tokens], verbose=False)["input_ids"]
    prompt = torch.tensor([ids[:prompt_tokens]], device=device)
    with attach(loaded.model, calibration, storage=StorageConfig()) as session:
        result = bench(session, prompt, decode_tokens=steps, policies=POLICIES).to_dict()
        cache = session.new_cache(tokens=prompt_tokens)
        for piece in (prompt, prompt[:, -1:]):  # the first step chooses who gathers
            forward(loaded.model, piece, cache, last_only=True)
        result["pinned_share"] = cache.storage.pinned_share
        result["gather"] = [lane.gather for lane in cache.storage.lanes]
        cache.close()
    for each in result["policies"]:
        say(
            f"{each['policy']:16} {each['step_ms_median']:8.2f} ms a step "
            f"(p90 {each['step_ms_p90']:.2f}), {each['ratio_to_ideal']:.2f} x ideal, "
            f"{each['link_bytes_per_step'] / 1e6:.2f} MB a step, KL {each['kl_to_ideal']:.4f}"
        )
    return result


def plain(value: Any) -> Any:
    """For JSON, which has no NaN."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main() -> int:
    """Run everything; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--no-bench", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if not torch.cuda.is_available():
        say(f"no CUDA device: torch {torch.__version__} sees none, so nothing was checked")
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "triton": HAS_TRITON,
        "bus_bytes_per_s": bus_rate(device),
    }
    say(f"{result['device']}, pinned memory at {(result['bus_bytes_per_s'] or 0) / 1e9:.1f} GB/s")
    result["checks"] = run_checks(device)
    if not options.no_bench:
        result["bench"] = run_bench(device, options.prompt_tokens, options.steps)
    result["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    print(json.dumps(plain(result), allow_nan=False))
    return int(any(said.startswith("FAILED") for said in result["checks"].values()))


if __name__ == "__main__":
    sys.exit(main())
