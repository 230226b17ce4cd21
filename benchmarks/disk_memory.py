"""Peak memory of a long prompt and some steps, with the KV in memory and on disk.

    python benchmarks/disk_memory.py [--prompt-tokens 7900] [--chunk 256] [--batch 4]

Every setting runs in a process of its own. One JSON object per setting on stdout. float32, because
in bfloat16 oneDNN keeps a compiled kernel for every shape that it has met: hundreds of MB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import torch

from infinigen_kv import StorageConfig, attach, calibrate, load_model
from infinigen_kv.cache.forward import forward, prefill
from infinigen_kv.calibration.texts import documentation_text
from process_memory import forget_peak, resident_bytes

SETTINGS = {
    "short prompt": ("ideal", StorageConfig()),
    "ideal, in memory": ("ideal", StorageConfig()),
    "stream, disk": ("stream", StorageConfig(home="disk")),
    "infinigen, disk, resident 5 %": ("infinigen", StorageConfig(home="disk", resident=0.05)),
}


@torch.no_grad()
def run(name: str, prompt_tokens: int, chunk: int, batch: int) -> dict[str, object]:
    """One setting, in this process."""
    policy, storage = SETTINGS[name]
    if name == "short prompt":
        prompt_tokens = 2 * chunk
    loaded = load_model("smollm2", dtype=torch.float32)
    calibration = calibrate(loaded.model, loaded.tokenizer)
    ids = loaded.tokenizer(documentation_text()[:200_000], verbose=False)["input_ids"]
    prompt = torch.tensor([ids[row * 100 :][:prompt_tokens] for row in range(batch)])
    forget_peak()
    before = resident_bytes("VmRSS")
    with attach(loaded.model, calibration, storage=storage) as session:
        cache = session.new_cache(tokens=prompt_tokens + 8, policy=policy)
        token = prefill(session, cache, prompt, chunk=chunk).argmax(-1)
        for _ in range(8):
            token = forward(loaded.model, token, cache).argmax(-1)
        return {
            "setting": name,
            "prompt_tokens": prompt_tokens,
            "batch": batch,
            "chunk": chunk,
            "peak_over_model_bytes": resident_bytes("VmHWM") - before,
            "home_bytes": cache.home_bytes,
            "device_kv_bytes": cache.device_bytes,
        }


def main() -> None:
    """Run all settings, or the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prompt-tokens", type=int, default=7900)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--setting", choices=SETTINGS)
    options = parser.parse_args()
    if options.setting is not None:
        result = run(options.setting, options.prompt_tokens, options.chunk, options.batch)
        print(json.dumps(result), flush=True)
        return
    for name in SETTINGS:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--setting", name], check=True)


if __name__ == "__main__":
    main()
