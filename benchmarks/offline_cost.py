"""When a calibration has paid off: its seconds over what it saves in a step, in generated tokens.

Takes the artefact that ``infinigen-kv calibrate --output DIR`` wrote, and the last line of
``infinigen-kv bench --policies ideal,stream,infinigen ... --json`` from the same machine::

    python benchmarks/offline_cost.py DIR BENCH.json

The saving is that of one decode step of the bench's rows; prefill is left out. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.calibration.cost import break_even_tokens, total_seconds

SLOW, FAST = "stream", "infinigen"


def main() -> None:
    """Read both and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artefact", type=Path, help="folder of the calibration")
    parser.add_argument("bench", type=Path, help="file with the bench's JSON on its last line")
    parser.add_argument("--slow", default=SLOW, help="policy without calibration")
    parser.add_argument("--fast", default=FAST, help="policy with it")
    options = parser.parse_args()
    cost = Calibration.load(options.artefact).cost
    if "collecting" not in cost:
        parser.error(f"{options.artefact} does not say what it cost: calibrate again")
    bench = json.loads(options.bench.read_text(encoding="utf-8").splitlines()[-1])
    steps = {each["policy"]: each["step_ms_median"] for each in bench["policies"]}
    missing = [name for name in (options.slow, options.fast) if name not in steps]
    if missing:
        parser.error(f"{options.bench} has no policy {missing[0]}: it has {', '.join(steps)}")
    print(json.dumps(figures(cost, bench, steps[options.slow], steps[options.fast]), indent=1))


def figures(cost: Any, bench: dict[str, Any], slow_ms: float, fast_ms: float) -> dict[str, Any]:
    """What is printed; the break-even in steps and in tokens of all rows."""
    seconds = total_seconds(cost)
    steps = break_even_tokens(seconds, slow_ms / 1e3, fast_ms / 1e3)
    rows = bench["batch"]
    return {
        "stages": dict(cost),
        "calibration_seconds": seconds,
        "slow_step_ms": slow_ms,
        "fast_step_ms": fast_ms,
        "break_even_steps": steps,
        "break_even_tokens": None if steps is None else steps * rows,
        "batch": rows,
        "link": bench["link"],
        "link_is_emulated": bench["link_is_emulated"],
    }


if __name__ == "__main__":
    main()
