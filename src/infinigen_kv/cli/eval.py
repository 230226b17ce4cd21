"""``infinigen-kv eval``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinigen_kv.cli.bench import parse_budget
from infinigen_kv.cli.eval_report import distinct, print_averages, print_points
from infinigen_kv.cli.eval_tasks import (
    FEW_SHOT,
    FEW_SHOT_TASKS,
    LENGTHS,
    POLICIES,
    check_suits,
    make_tasks,
    parse_lengths,
    parse_names,
    task_options,
)
from infinigen_kv.cli.loading import (
    calibrated,
    check_fit,
    load,
    read_calibration,
    selected_config,
    selected_storage,
)
from infinigen_kv.cli.options import JsonOption, ModelOptions, SelectionOptions
from infinigen_kv.cli.output import print_json
from infinigen_kv.cli.storage_options import StorageOptions, storage_record
from infinigen_kv.cli.sweep import homes
from infinigen_kv.errors import InputError
from infinigen_kv.progress import bar

if TYPE_CHECKING:
    from infinigen_kv.evals.run import Point, Subject
    from infinigen_kv.evals.store import PointStore
    from infinigen_kv.evals.task import Task
    from infinigen_kv.storage import StorageConfig


def evaluate(
    *,
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            metavar="LIST",
            help="wikitext2, ptb, code, german, text, passkey, needles, extraction, speculation, "
            "similarity, attention, sparsity, skew, "
            f"copa, openbookqa, winogrande, piqa, rte ({FEW_SHOT}: these five), or lm-eval:NAME "
            "for any other task of lm-evaluation-harness; separated by commas.",
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
    capacities: Annotated[
        str | None,
        typer.Option(
            "--capacities",
            metavar="LIST",
            help="Several of --capacity, e.g. 10%,50%,none, each measured on its own; with "
            "--codecs every one with each codec.",
            show_default=False,
        ),
    ] = None,
    codecs: Annotated[
        str | None,
        typer.Option(
            "--codecs",
            metavar="LIST",
            help="Several of --codec, e.g. none,int8,int4. Add --resident-layers none to compare "
            "them in the same layers.",
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
            help="Text of the tasks text, needles and those that look into the model.",
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            "--lengths",
            metavar="LIST",
            help="Needles, extraction, sparsity: tokens of the contexts.",
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
    task_names, policy_names = parse_names(tasks, policies)
    config = selection.config()
    places = _check_storage(storage, capacities, codecs)
    share = parse_budget(budget)
    options = task_options(
        window=window,
        prompt_tokens=prompt_tokens,
        text=text,
        lengths=parse_lengths(lengths),
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
    made_tasks = make_tasks(task_names, loaded, data, options)
    for task in made_tasks:
        check_suits(task, policy_names)
    made = calibrated(loaded, given)
    config = selected_config(selection, made)
    places = [selected_storage(each, config, made, loaded) for each in places]
    subjects = [Subject(loaded.model, made, config, each, share) for each in places]
    points = [
        point
        for task in made_tasks
        for point in _evaluate(subjects, task, policy_names, limit=limit, store=store)
    ]
    several = len(places) > 1
    few_shot = [point for point in points if point.task in FEW_SHOT_TASKS]
    means = print_averages(few_shot, several_homes=several)
    if json:
        print_json(
            {
                "model": target.model,
                "dtype": str(loaded.model.dtype).removeprefix("torch."),
                "config": asdict(config),
                "storage": storage_record(storage.config()),
                "budget": share,
                "calibration_cost": dict(made.cost),
                "points": [point.to_dict() for point in points],
                "means": means,
            }
        )


def _check_storage(
    storage: StorageOptions, capacities: str | None, codecs: str | None
) -> list[StorageConfig]:
    useless = [name for name in storage.given() if name in ("--home", "--home-dir", "--link")]
    if useless:
        raise InputError(
            f"{useless[0]} changes how fast a policy is and not what it computes: leave it out"
        )
    return homes(storage, capacities, codecs)


def _evaluate(
    subjects: list[Subject],
    task: Task,
    policies: list[str],
    *,
    limit: int | None,
    store: PointStore,
) -> list[Point]:
    """One task in all homes, and its table at once: the next may take long."""
    from infinigen_kv.evals.run import evaluate as run

    points = [
        point
        for subject in subjects
        for point in run(subject, task, policies, limit=limit, store=store, progress=bar)
    ]
    found = distinct(points)
    print_points(found, several_homes=len(subjects) > 1)
    return found
