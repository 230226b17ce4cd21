"""Policies measured on tasks, sample by sample, in an order that loses little when interrupted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from typing import Any

from transformers import PreTrainedModel

from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.calibration.fingerprint import digest, model_digest
from infinigen_kv.checks import check_integer
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import InputError
from infinigen_kv.files import plain
from infinigen_kv.policies.registry import cache_plan, check_policy
from infinigen_kv.policies.settings import BUDGET
from infinigen_kv.progress import Progress, no_progress
from infinigen_kv.session.attach import Session, attach
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv_lab.evals.reading import FULL, Reader
from infinigen_kv_lab.evals.store import SampleStore, sample_key
from infinigen_kv_lab.evals.task import Result, Sample, Task
from infinigen_kv_lab.points import PointKey


@dataclass(frozen=True, slots=True)
class Point:
    """A task under a policy: its figures, and how much they rest on.

    ``samples`` of ``available`` were measured, in ``seconds`` altogether, earlier runs included.
    """

    task: str
    policy: str
    settings: dict[str, Any]
    samples: int
    available: int
    seconds: float
    result: Result

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return plain({**own, "result": self.result.to_dict()})


@dataclass(frozen=True, slots=True)
class Subject:
    """What is evaluated: an unattached model, its calibration, and the settings to attach with."""

    model: PreTrainedModel
    calibration: Calibration | None
    config: InfiniGenConfig
    storage: StorageConfig
    budget: float = BUDGET
    """Share of the cached tokens for the policies with a fixed budget."""
    identity: str | None = None
    """What `model_digest` says of the model, where that is known: it reads many weights."""

    def reader(self, session: Session, policy: str) -> Reader:
        """Reads texts of one sample."""
        return Reader(session, policy, budget=self.budget, calibration=self.calibration)

    def describe(self, config: InfiniGenConfig) -> dict[str, Any]:
        """All that figures depend on but the task and the policy."""
        made = self.calibration
        return {
            "version": version("infinigen-kv"),
            "model": self.identity or model_digest(self.model),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "calibration": None if made is None else digest(dict(made.settings)),
            "config": asdict(config),
            "storage": asdict(self.storage),
            "budget": self.budget,
        }


def evaluate(
    subject: Subject,
    task: Task,
    policies: Sequence[str],
    *,
    limit: int | None = None,
    store: SampleStore | None = None,
    progress: Progress = no_progress,
) -> list[Point]:
    """Measure policies on one task, all of them on a sample before the next one.

    Every finished sample is kept in ``store`` at once: after an interruption, or with a higher
    ``limit``, only the others are measured.

    Parameters
    ----------
    policies
        Names of `policies.registry.POLICIES`; those that do not suit the task are left out. With
        ``ideal`` among them the others' results say how they differ from it, paired by sample.
    limit
        Samples at most; None for all.
    progress
        Wraps the list of samples.

    Raises
    ------
    InputError
        If a policy is unknown, ``limit`` below 1, or the task does not fit the model.
    """
    names = _suitable(task, policies)
    if limit is not None:
        check_integer("limit", limit, 1)
    store = store or SampleStore(None)
    config = task.config(subject.config)
    count = min(len(task), limit or len(task))
    keys = _keys(subject, config, task, names)
    held = {name: store.samples(key)[:count] for name, key in keys.items()}
    if any(len(samples) < count for samples in held.values()):
        with attach(subject.model, subject.calibration, config, subject.storage) as session:
            _measure(subject, session, task, keys, held, count, store, progress)
    points = []
    for name in names:
        full = held.get(FULL) if name != FULL else None
        result = task.summarise(held[name], full)
        seconds = sum(each["seconds"] for each in held[name])
        points.append(
            Point(task.name, name, keys[name].head["settings"], count, len(task), seconds, result)
        )
        store.keep(keys[name], held[name], result.to_dict())
    return points


def samples_kept(
    subject: Subject, task: Task, policies: Sequence[str], store: SampleStore, *, limit: int | None
) -> int:
    """How many samples, the first ones, `evaluate` would not measure, since all policies have them.

    Raises
    ------
    InputError
        As `evaluate`.
    """
    names = _suitable(task, policies)
    count = min(len(task), limit or len(task))
    keys = _keys(subject, task.config(subject.config), task, names)
    return min(count, *(len(store.samples(key)) for key in keys.values()))


def _suitable(task: Task, policies: Sequence[str]) -> list[str]:
    """Those of the policies that suit the task, each once."""
    names = [check_policy(name) for name in dict.fromkeys(policies)]
    if not names:
        raise InputError("policies=() is not valid: name at least one")
    suitable = [name for name in names if task.suits(name)]
    if not suitable:
        raise InputError(f"task {task.name!r} suits none of the policies {', '.join(policies)}")
    return suitable


def _keys(
    subject: Subject, config: InfiniGenConfig, task: Task, policies: Sequence[str]
) -> dict[str, PointKey]:
    """What each policy's point on the task is kept under."""
    about = {**subject.describe(config), "task": task.settings}
    return {
        name: sample_key(
            task.name, name, {**about, "storage": asdict(_storage_of(name, subject, config))}
        )
        for name in policies
    }


def _storage_of(policy: str, subject: Subject, config: InfiniGenConfig) -> StorageConfig:
    """The subject's storage, with the defaults in place of what the policy does not use.

    So what is measured for one storage is found again for another.
    """
    used = cache_plan(policy, config, subject.storage).storage
    storage = subject.storage
    for field in fields(StorageConfig):
        changes: dict[str, Any] = {field.name: field.default}
        plainer = replace(storage, **changes)
        if cache_plan(policy, config, plainer).storage == used:
            storage = plainer
    return storage


def _measure(
    subject: Subject,
    session: Session,
    task: Task,
    keys: dict[str, PointKey],
    held: dict[str, list[Sample]],
    count: int,
    store: SampleStore,
    progress: Progress,
) -> None:
    """Append to ``held`` the samples that it lacks."""
    start = min(len(samples) for samples in held.values())
    for index in progress(range(start, count), task.name):
        shared = task.prepare(session, index)
        for name in keys:
            if len(held[name]) > index:
                continue
            started = time.perf_counter()
            sample = task.measure(subject.reader(session, name), index, shared)
            seconds = time.perf_counter() - started
            held[name].append(plain({**sample, "seconds": seconds}))
            store.keep(keys[name], held[name])
