"""``infinigen-kv eval``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinigen_kv.cli.bench import parse_budget
from infinigen_kv.cli.loading import calibrated, check_fit, load, read_calibration
from infinigen_kv.cli.options import JsonOption, ModelOptions, SelectionOptions
from infinigen_kv.cli.output import print_json, say, table
from infinigen_kv.cli.storage_options import StorageOptions, storage_record
from infinigen_kv.errors import InputError
from infinigen_kv.progress import bar

if TYPE_CHECKING:
    from infinigen_kv.evals.run import Point, Subject
    from infinigen_kv.evals.task import Task, TaskOptions
    from infinigen_kv.storage import StorageConfig

POLICIES = "ideal,infinigen-paper,infinigen"
FEW_SHOT = "fewshot"
FEW_SHOT_TASKS = ("copa", "openbookqa", "winogrande", "piqa", "rte")
LENGTHS = "1024,2048,4096"


def evaluate(
    *,
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            metavar="LIST",
            help="wikitext2, ptb, text, passkey, needles, extraction, speculation, copa, "
            f"openbookqa, winogrande, piqa, rte ({FEW_SHOT}: these five), or lm-eval:NAME for any "
            "other task of lm-evaluation-harness; separated by commas.",
            show_default=False,
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DIR",
            help="Folder of the tasks' files. [default: none; the few-shot tasks then come from "
            "the Hugging Face hub]",
            show_default=False,
        ),
    ] = None,
    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            metavar="LIST",
            help="What to compare, separated by commas; ideal is the full cache.",
        ),
    ] = POLICIES,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="SHARE",
            help="Share of the cached tokens for the policies with a fixed budget, e.g. 10% or "
            "0.1. [default: 20%]",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            help="Windows, prompts or documents of each task at most. [default: all]",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder where measurements are kept, one JSON file per task and policy; what is "
            "there already is not measured again. [default: nothing is kept]",
            show_default=False,
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            metavar="N",
            min=2,
            help="Texts: tokens of a window. [default: 3072, or the model's positions where it has "
            "fewer]",
            show_default=False,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--prompt-tokens",
            metavar="P",
            min=1,
            help="Texts: tokens at the start of a window that are read in full. [default: two "
            "thirds of it]",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text of the tasks text, needles and speculation.",
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            "--lengths", metavar="LIST", help="Needles and extraction: tokens of the contexts."
        ),
    ] = LENGTHS,
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats", metavar="N", min=1, help="Needles and extraction: contexts per length."
        ),
    ] = 5,
    ask_later: Annotated[
        bool,
        typer.Option(
            "--ask-later",
            help="Passkey: ask once the cache is built, in decode steps, instead of in the prompt.",
        ),
    ] = False,
    shots: Annotated[
        int,
        typer.Option("--shots", metavar="K", min=0, help="Harness: solved examples in a prompt."),
    ] = 5,
    exact_prefix: Annotated[
        int,
        typer.Option(
            "--exact-prefix",
            metavar="N",
            min=1,
            help="Harness: tokens at the start of a prompt that are read in full.",
        ),
    ] = 128,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Of needles, lists and shots.")
    ] = 1234,
    json: JsonOption = False,
    storage: StorageOptions,
    selection: SelectionOptions,
    target: ModelOptions,
) -> None:
    """Measure how good a model stays under several policies: perplexity, retrieval, few-shot tasks,
    and the speculation itself.
    """
    task_names, policy_names = _names(tasks, policies)
    config, where = selection.config(), _check_storage(storage)
    share = parse_budget(budget)
    options = _task_options(
        window=window,
        prompt_tokens=prompt_tokens,
        text=text,
        lengths=_lengths(lengths),
        repeats=repeats,
        asked_later=ask_later,
        shots=shots,
        exact_prefix=exact_prefix,
        seed=seed,
    )
    from infinigen_kv.evals.run import Subject
    from infinigen_kv.evals.store import PointStore

    store = PointStore(out)
    given = read_calibration(selection.calibration)
    loaded = load(target)
    check_fit(loaded, given, config, 1)
    made_tasks = _make_tasks(task_names, loaded, data, options)
    for task in made_tasks:
        _check_suits(task, policy_names)
    made = calibrated(loaded, given)
    subject = Subject(loaded.model, made, config, where, share)
    points = [
        point
        for task in made_tasks
        for point in _evaluate(subject, task, policy_names, limit=limit, store=store)
    ]
    if json:
        settings = {"config": asdict(config), "storage": storage_record(where), "budget": share}
        print_json(
            {
                "model": target.model,
                "dtype": str(loaded.model.dtype).removeprefix("torch."),
                **settings,
                "points": [point.to_dict() for point in points],
            }
        )


def _names(tasks: str, policies: str) -> tuple[list[str], list[str]]:
    """Tasks and policies by name, each checked, none twice."""
    from infinigen_kv.evals.registry import check_task
    from infinigen_kv.policies.registry import check_policy

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


def _check_storage(storage: StorageOptions) -> StorageConfig:
    useless = [name for name in storage.given() if name in ("--home", "--home-dir", "--link")]
    if useless:
        raise InputError(
            f"{useless[0]} changes how fast a policy is and not what it computes: leave it out"
        )
    return storage.config()


def _task_options(**values: Any) -> TaskOptions:
    from infinigen_kv.evals.task import TaskOptions

    try:
        return TaskOptions(**values)
    except InputError as error:
        field, _, rest = str(error).partition("=")
        raise InputError(f"--{field.replace('_', '-')} {rest}") from error


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise InputError(
            f"--lengths {text!r} is not valid: it must be numbers of tokens like {LENGTHS}"
        ) from error


def _make_tasks(
    names: list[str], loaded: Any, data: Path | None, options: TaskOptions
) -> list[Task]:
    from infinigen_kv.evals.registry import make_task
    from infinigen_kv.evals.task import Inputs

    if data is not None and not data.is_dir():
        raise InputError(f"--data {data}: no such folder")
    positions = getattr(loaded.model.config, "max_position_embeddings", None)
    inputs = Inputs(loaded.tokenizer, positions, data, options)
    return [make_task(name, inputs) for name in names]


def _check_suits(task: Task, policies: list[str]) -> None:
    """Say which policies a task leaves out; `InputError` where it leaves out all."""
    others = [name for name in policies if not task.suits(name)]
    if len(others) == len(policies):
        raise InputError(f"task {task.name!r} suits none of the policies {', '.join(policies)}")
    if others:
        say(f"task {task.name}: without {', '.join(others)}, which it does not suit")


def _evaluate(subject: Subject, task: Task, policies: list[str], **options: Any) -> list[Point]:
    """One task, and its table at once: the next may take long."""
    from infinigen_kv.evals.run import evaluate as run

    points = run(subject, task, policies, progress=bar, **options)
    _print(points)
    return points


def _print(points: list[Point]) -> None:
    first = points[0]
    title = f"{first.task}, {first.samples} of {first.available} samples, intervals of 95 %"
    columns = list(first.result.headline())
    rows = []
    for point in points:
        seconds = f"{point.seconds / point.samples:.1f}"
        rows.append([point.policy, *point.result.headline().values(), seconds])
    table(title, ["policy", *columns, "s a sample"], rows)
