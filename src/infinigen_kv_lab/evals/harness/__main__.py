"""lm-evaluation-harness's own command line, with this engine among its models.

``python -m infinigen_kv_lab.evals.harness run --model infinigen_kv --model_args
pretrained=smollm2,policy=infinigen,max_fetch=0.1 --tasks piqa`` reads PIQA from the hub.

The folder ``tasks`` beside this file (`local.TASKS`) describes the paper's five tasks over JSON
Lines files, which need no network: ``--include_path .../tasks --tasks piqa_local --metadata
'{"data": "DIR"}'``, or ``--tasks fewshot_local`` for all five.

``lm_eval`` alone has no way to find the model: call it through this module, which takes the same
arguments.
"""

from __future__ import annotations

import sys

from infinigen_kv.errors import InfiniGenError
from infinigen_kv_lab.evals.harness import usable


def main() -> None:
    """Register the model, then do what ``lm-eval`` would."""
    try:
        usable()
        from lm_eval.__main__ import cli_evaluate

        import infinigen_kv_lab.evals.harness.model  # registers itself  # noqa: F401

        cli_evaluate()
    except InfiniGenError as error:
        sys.exit(f"infinigen_kv: {error}")


if __name__ == "__main__":
    main()
