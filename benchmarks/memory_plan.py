"""The memory plan of SmolLM2 against what a run allocates.

    python benchmarks/memory_plan.py [--prompt-tokens 2000] [--steps 8] [--chunk 512]

Every setting runs in a process of its own: prompt, some steps, and then the sizes of the cache,
layer by layer, and the process's resident memory above that of the loaded model: now (what stays)
and at its peak. A table goes to stderr, one JSON object per setting to stdout. Linux.

float32, because in bfloat16 oneDNN keeps a compiled kernel for every shape that it has met:
hundreds of MB. And with a fixed ``MALLOC_MMAP_THRESHOLD_``, so that memory that PyTorch frees goes
back to the system: glibc's heap otherwise keeps some of it, which ``--heap`` shows.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from typing import Any

import torch

from infinigen_kv import StorageConfig, attach, calibrate, load_model
from infinigen_kv.cache.forward import forward, prefill
from infinigen_kv.calibration.texts import documentation_text
from infinigen_kv.memory import calibration_fields, model_request, plan_memory
from infinigen_kv.memory.plan import CacheBytes
from process_memory import forget_peak, resident_bytes

MAPPED = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024)}  # glibc's own default grows to 32 MiB
LINK = "emulated:1000"  # far faster than the machine: home and device are apart, no time is lost
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "in memory": (1, {}),
    "in memory, 2 rows": (2, {}),
    "int4": (1, {"codec": "int4"}),
    "link": (1, {"link": LINK}),
    "link, int8, resident 5 %": (1, {"link": LINK, "codec": "int8", "resident": 0.05}),
    "link, capacity 80 %": (1, {"link": LINK, "capacity": 0.8}),
    "disk": (1, {"home": "disk"}),
    "disk, int8, resident 5 %, 2 rows": (2, {"home": "disk", "codec": "int8", "resident": 0.05}),
}


@torch.no_grad()
def run(name: str, prompt_tokens: int, steps: int, chunk: int) -> dict[str, Any]:
    """One setting, in this process."""
    rows, storage = SETTINGS[name]
    loaded = load_model("smollm2", dtype=torch.float32)
    calibration = calibrate(loaded.model, loaded.tokenizer)
    ids = loaded.tokenizer(documentation_text()[:200_000], verbose=False)["input_ids"]
    prompt = torch.tensor([ids[row * 100 :][:prompt_tokens] for row in range(rows)])
    context = prompt_tokens + steps
    with attach(loaded.model, calibration, storage=StorageConfig(**storage)) as session:
        request = model_request(
            loaded.model,
            context=context,
            new_tokens=steps,
            rows=rows,
            prompt_chunk=chunk,
            storage=session.storage,
            **calibration_fields(calibration),
        )
        plan = plan_memory(request)
        warm_up = session.new_cache(tokens=400)  # whatever a first run loads and compiles
        prefill(session, warm_up, prompt[:, :300])
        forward(loaded.model, prompt[:, :1], warm_up)
        warm_up.close()
        forget_peak()
        before = resident_bytes("VmRSS")
        cache = session.new_cache(tokens=context)
        token = prefill(session, cache, prompt, chunk=chunk).argmax(-1)
        for _ in range(steps):
            token = forward(loaded.model, token, cache).argmax(-1)
        gc.collect()
        (planned,) = plan.caches
        held = plan.total("device") - plan["weights"].device - plan["calibration"].host
        workspace = max(plan["prompt"].device, plan["decode step"].device)
        return {
            "setting": name,
            "rows": rows,
            "prompt_tokens": prompt_tokens,
            "chunk": request.chunk,
            "home_bytes": cache.home_bytes,
            "home_bytes_planned": planned.home_bytes,
            "device_kv_bytes": cache.device_bytes,
            "device_kv_bytes_planned": planned.device_bytes,
            "worst_layer": worst_layer(cache, planned),
            "kept_bytes": resident_bytes("VmRSS") - before,
            "kept_bytes_planned": held - workspace - plan["staging buffers"].host,
            "peak_bytes": resident_bytes("VmHWM") - before,
            "peak_bytes_planned": held,
        }


def worst_layer(cache: Any, planned: CacheBytes) -> float:
    """Largest relative error of a layer's bytes, home and device apart."""
    worst = 0.0
    for layer, plan in zip(cache.offloaded, planned.layers, strict=True):
        device = layer.pool.device_bytes + layer.policy.nbytes
        for found, expected in ((layer.pool.home_bytes, plan.home), (device, plan.device_kv)):
            worst = max(worst, abs(expected - found) / max(1, found))
    return worst


def line(result: dict[str, Any]) -> str:
    """Measured and planned MB of a setting."""
    text = f"{result['setting']:34}"
    for name in ("home_bytes", "device_kv_bytes", "kept_bytes", "peak_bytes"):
        measured, planned = result[name], result[f"{name}_planned"]
        error = f"{planned / measured - 1:+6.1%}" if measured else "      "
        text += f"{measured / 1e6:9.1f} {planned / 1e6:7.1f} {error}"
    return f"{text}   worst layer {result['worst_layer']:.1%}"


def main() -> None:
    """Run all settings, or the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--heap", action="store_true")
    parser.add_argument("--setting", choices=SETTINGS)
    options = parser.parse_args()
    if options.setting is not None:
        result = run(options.setting, options.prompt_tokens, options.steps, options.chunk)
        print(json.dumps(result), flush=True)
        return
    titles = ("home", "device KV", "kept", "peak")
    head = "".join(f"{f'{title}: found planned':>25}" for title in titles)
    print(f"{'MB':34}{head}", file=sys.stderr)
    for name in SETTINGS:
        call = [sys.executable, __file__, *sys.argv[1:], "--setting", name]
        environment = dict(os.environ) | ({} if options.heap else MAPPED)
        output = subprocess.run(
            call, check=True, stdout=subprocess.PIPE, text=True, env=environment
        ).stdout
        print(output, end="", flush=True)
        print(line(json.loads(output.splitlines()[-1])), file=sys.stderr)


if __name__ == "__main__":
    main()
