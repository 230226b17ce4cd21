"""The harness without a model: its requests for a task, and its figures from given answers.

It runs twice, first to collect what it asks and later to score what was measured in between, so
that measuring may stop and go on, one document at a time.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import lm_eval
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager

from infinigen_kv.errors import InputError

KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
UNKNOWN = {"loglikelihood": (0.0, False), "loglikelihood_rolling": 0.0, "generate_until": ""}


@dataclass(frozen=True, slots=True)
class Request:
    """One thing that the harness asks of a model about a document."""

    kind: str
    arguments: tuple[Any, ...]

    @property
    def key(self) -> str:
        """The same for equal requests."""
        return json.dumps([self.kind, self.arguments], sort_keys=True, default=str)


@dataclass(frozen=True, slots=True)
class Metric:
    """One of the task's metrics: the harness's figure, and each document's part of it."""

    name: str
    value: float
    documents: tuple[float, ...] | None
    """None where the metric is no mean over documents."""


class _Answering(LM):
    """Hands every request to a function."""

    def __init__(self, answer: Callable[[str, Any], Any]) -> None:
        super().__init__()
        self._answer = answer

    def loglikelihood(self, requests: Any) -> list[Any]:
        return [self._answer("loglikelihood", each) for each in requests]

    def loglikelihood_rolling(self, requests: Any) -> list[Any]:
        return [self._answer("loglikelihood_rolling", each) for each in requests]

    def generate_until(self, requests: Any) -> list[Any]:
        return [self._answer("generate_until", each) for each in requests]


class HarnessRun:
    """One task of the harness.

    Parameters
    ----------
    task
        The description of a task, or the name of one that the harness knows.
    shots
        Solved examples before each question; None for the task's own number.
    seed
        Which examples.

    Raises
    ------
    InputError
        The harness does not know the task, cannot load it, or means several by the name.
    """

    def __init__(self, task: dict[str, Any] | str, *, shots: int | None, seed: int) -> None:
        with _quiet():
            self._task = _load(task) if isinstance(task, str) else ConfigurableTask(config=task)
        self._name = str(self._task.config.task)
        if shots is not None and self._task.get_config("num_fewshot") != 0:
            self._task.set_config(key="num_fewshot", value=shots)
        elif self._task.get_config("num_fewshot") is None:
            self._task.set_config(key="num_fewshot", value=0)
        self._seed = seed
        self.documents = self._collect()
        """The requests of each document."""

    def metrics(self, answers: Sequence[Sequence[Any]]) -> list[Metric]:
        """Figures of the first ``len(answers)`` documents, whose requests were answered so."""
        known = {
            request.key: answer
            for requests, given in zip(self.documents, answers, strict=False)
            for request, answer in zip(requests, given, strict=True)
        }

        def answer(kind: str, instance: Any) -> Any:
            found = known[Request(kind, instance.args).key]
            return tuple(found) if kind == "loglikelihood" else found

        found = self._evaluate(answer, limit=len(answers))
        return _metrics(found["results"][self._name], found["samples"][self._name])

    def _collect(self) -> list[list[Request]]:
        documents: dict[int, list[Request]] = {}

        def note(kind: str, instance: Any) -> Any:
            documents.setdefault(instance.doc_id, []).append(Request(kind, instance.args))
            return UNKNOWN[kind]

        try:
            self._evaluate(note, limit=None)
        except (ValueError, AssertionError) as error:  # e.g. too few examples for the shots
            reason = " ".join(str(error).split())[:300]
            raise InputError(
                f"task {self._name!r} makes no prompts with {self._task.get_config('num_fewshot')} "
                f"shots ({reason}): choose fewer shots, or more examples to choose them from"
            ) from error
        return [documents[number] for number in sorted(documents)]

    def _evaluate(self, answer: Callable[[str, Any], Any], *, limit: int | None) -> dict[str, Any]:
        self._task.set_fewshot_seed(seed=self._seed)  # or the shots would differ from call to call
        with _quiet():
            found: dict[str, Any] = lm_eval.evaluate(
                lm=_Answering(answer),
                task_dict={self._name: self._task},
                limit=limit,
                bootstrap_iters=0,
                log_samples=True,
            )
        return found


def _load(name: str) -> Task:
    """A task that the harness knows by name."""
    try:
        found = TaskManager().load([name])["tasks"]
    except (KeyError, OSError, ValueError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"task {name!r} cannot be loaded by lm-evaluation-harness ({type(error).__name__}: "
            f"{reason}): check the name; without a network only data fetched before can be used"
        ) from error
    if len(found) != 1:
        raise InputError(
            f"{name!r} means {len(found)} tasks of lm-evaluation-harness, not one: name one of "
            f"{', '.join(sorted(found)[:20])}"
        )
    (task,) = found.values()
    return task


def _metrics(figures: dict[str, Any], samples: Sequence[dict[str, Any]]) -> list[Metric]:
    found = []
    for key, value in figures.items():
        name, comma, chosen = key.partition(",")
        if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        mine = [each for each in samples if each.get("filter", chosen) == chosen]
        mine.sort(key=lambda each: each["doc_id"])
        parts = [each.get(name) for each in mine]
        label = name if chosen == "none" else key
        if all(isinstance(part, int | float) for part in parts):
            found.append(Metric(label, float(value), tuple(float(part or 0.0) for part in parts)))
        else:
            found.append(Metric(label, float(value), None))
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness's log and progress, which are about a run that takes no time."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)
