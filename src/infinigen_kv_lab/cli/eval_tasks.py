"""The tasks of ``infinigen-kv eval``, from the options as typed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinigen_kv.cli.output import say
from infinigen_kv.errors import InputError

if TYPE_CHECKING:
    from infinigen_kv_lab.evals.task import Task, TaskOptions

POLICIES = "ideal,infinigen-paper,infinigen"
FEW_SHOT = "fewshot"
FEW_SHOT_TASKS = ("copa", "openbookqa", "winogrande", "piqa", "rte")
LENGTHS = "1024,2048,4096"


def parse_names(tasks: str, policies: str) -> tuple[list[str], list[str]]:
    """Tasks and policies by name, each checked, none twice."""
    from infinigen_kv.policies.registry import check_policy
    from infinigen_kv_lab.evals.registry import check_task

    wanted = [name.strip() for name in tasks.split(",") if name.strip()]
    if not wanted:
        raise InputError(f"--tasks {tasks!r} names none")
    expanded: list[str] = []
    for name in wanted:
        expanded += FEW_SHOT_TASKS if name == FEW_SHOT else [check_task(name)]
    names = [check_policy(name.strip()) for name in policies.split(",") if name.strip()]
    if not names:
        raise InputError(f"--policies {policies!r} names none: the default is {POLICIES}")
    return list(dict.fromkeys(expanded)), list(dict.fromkeys(names))


def parse_lengths(text: str) -> tuple[int, ...]:
    """Numbers of tokens, separated by commas."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise InputError(
            f"--lengths {text!r} is not valid: it must be numbers of tokens like {LENGTHS}"
        ) from error


def make_tasks(
    names: list[str], loaded: Any, data: Path | None, options: TaskOptions
) -> list[Task]:
    """The tasks of these names, their data read and checked."""
    from infinigen_kv_lab.evals.registry import make_task
    from infinigen_kv_lab.evals.task import Inputs

    if data is not None and not data.is_dir():
        raise InputError(f"--data {data}: no such folder")
    positions = getattr(loaded.model.config, "max_position_embeddings", None)
    inputs = Inputs(loaded.tokenizer, positions, data, options)
    return [make_task(name, inputs) for name in names]


def check_suits(task: Task, policies: list[str]) -> None:
    """Say which policies a task leaves out; `InputError` where it leaves out all."""
    others = [name for name in policies if not task.suits(name)]
    if len(others) == len(policies):
        raise InputError(f"task {task.name!r} suits none of the policies {', '.join(policies)}")
    if others:
        say(f"task {task.name}: without {', '.join(others)}, which it does not suit")
