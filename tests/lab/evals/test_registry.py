"""Tasks by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.registry import TASKS, check_task


@pytest.mark.parametrize(
    ("name", "near"),
    [("wikitext", "wikitext2"), ("WinoGrande", "winogrande"), ("passkeys", "passkey")],
)
def test_near_names_are_suggested(name: str, near: str) -> None:
    with pytest.raises(InputError, match=rf"task '{name}' is not known: did you mean .*{near}"):
        check_task(name)


def test_names_near_to_nothing_and_names_of_the_harness() -> None:
    with pytest.raises(InputError, match="is not known: there are wikitext2, ptb"):
        check_task("zzz")
    with pytest.raises(InputError, match="is not known"):
        check_task("lm-eval:")
    assert check_task("lm-eval:arc_easy") == "lm-eval:arc_easy"
    assert [check_task(name) for name in TASKS] == list(TASKS)


def test_the_harness_is_not_imported_unless_used() -> None:
    """Importing what the other tasks need loads neither it nor the tasks' own modules."""
    code = (
        "import sys, infinigen_kv_lab.evals.registry, infinigen_kv_lab.evals.run;"
        "import infinigen_kv_lab.cli.eval;"
        "import infinigen_kv_lab.evals.fewshot, infinigen_kv_lab.evals.harness;"
        "own = 'infinigen_kv_lab.evals.passkey';"
        "print([name for name in ('lm_eval', 'datasets', own) if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
