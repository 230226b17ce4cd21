"""``infinigen-kv eval``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

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
from infinigen_kv.cli.sizes import parse_budget
from infinigen_kv.cli.storage_options import StorageOptions, storage_record
from infinigen_kv.errors import InputError
from infinigen_kv.progress import bar
from infinigen_kv_lab.cli.eval_options import ContentOptions, EvaluationOptions
from infinigen_kv_lab.cli.eval_report import distinct, print_averages, print_points
from infinigen_kv_lab.cli.eval_tasks import FEW_SHOT_TASKS, check_suits, make_tasks, parse_names
from infinigen_kv_lab.cli.sweep import homes

if TYPE_CHECKING:
    from infinigen_kv.storage.config import StorageConfig
    from infinigen_kv_lab.evals.run import Point, Subject
    from infinigen_kv_lab.evals.store import SampleStore
    from infinigen_kv_lab.evals.task import Task


def evaluate(
    *,
    wanted: EvaluationOptions,
    contents: ContentOptions,
    json: JsonOption = False,
    storage: StorageOptions,
    selection: SelectionOptions,
    target: ModelOptions,
) -> None:
    """Measure how good a model stays under several policies: perplexity, retrieval, few-shot tasks,
    and the speculation itself.
    """
    task_names, policy_names = parse_names(wanted.tasks, wanted.policies)
    config = selection.config()
    places = _check_storage(storage, wanted)
    share = parse_budget(wanted.budget)
    options = contents.options()
    from infinigen_kv_lab.evals.run import Subject
    from infinigen_kv_lab.evals.store import SampleStore

    store = SampleStore(wanted.out)
    given = read_calibration(selection.calibration)
    loaded = load(target)
    check_fit(loaded, given, config, 1)
    made_tasks = make_tasks(task_names, loaded, wanted.data, options)
    for task in made_tasks:
        check_suits(task, policy_names)
    made = calibrated(loaded, given)
    config = selected_config(selection, made)
    places = [selected_storage(each, config, made, loaded) for each in places]
    subjects = [Subject(loaded.model, made, config, each, share) for each in places]
    points = [
        point
        for task in made_tasks
        for point in _evaluate(subjects, task, policy_names, limit=wanted.limit, store=store)
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


def _check_storage(storage: StorageOptions, wanted: EvaluationOptions) -> list[StorageConfig]:
    useless = [name for name in storage.given() if name in ("--home", "--home-dir", "--link")]
    if useless:
        raise InputError(
            f"{useless[0]} changes how fast a policy is and not what it computes: leave it out"
        )
    return homes(storage, wanted.capacities, wanted.codecs)


def _evaluate(
    subjects: list[Subject],
    task: Task,
    policies: list[str],
    *,
    limit: int | None,
    store: SampleStore,
) -> list[Point]:
    """One task in all homes, and its table at once: the next may take long."""
    from infinigen_kv_lab.evals.run import evaluate as run

    points = [
        point
        for subject in subjects
        for point in run(subject, task, policies, limit=limit, store=store, progress=bar)
    ]
    found = distinct(points)
    print_points(found, several_homes=len(subjects) > 1)
    return found
