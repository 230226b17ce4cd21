"""Evaluates trials: the model, its data, and what is kept of earlier runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.calibration.fingerprint import model_digest
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.progress import Progress, no_progress
from infinigen_kv_lab.evals.registry import make_task
from infinigen_kv_lab.evals.run import Subject, evaluate, samples_kept
from infinigen_kv_lab.evals.skewing import without_skew
from infinigen_kv_lab.evals.store import PointKey, PointStore
from infinigen_kv_lab.evals.task import Inputs, Sample, Task, TaskOptions
from infinigen_kv_lab.figures.accuracy.trial import Points, Trial
from infinigen_kv_lab.figures.worklist import Within


class FreshStore(PointStore):
    """Keeps points, and finds none of an earlier run."""

    def samples(self, key: PointKey) -> list[Sample]:
        """Nothing."""
        return []


class AccuracyLaboratory:
    """Evaluates the trials of one run.

    Parameters
    ----------
    model, tokenizer, calibration
        The model, not attached.
    data
        Folder of the tasks' files.
    points
        Folder in which every finished sample is kept.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        calibration: Calibration,
        data: Path,
        points: Path,
    ) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._calibration = calibration
        self._data = data
        self._identity = model_digest(model)
        self._store = PointStore(points)
        self._fresh_store = FreshStore(points)
        self._tasks: dict[tuple[str, TaskOptions], Task] = {}

    @property
    def positions(self) -> int | None:
        """Tokens that the model can tell apart; None for no limit."""
        return adapter_for(self.model).max_positions

    def measure(self, trial: Trial, within: Within, *, again: bool = False) -> Points:
        """Evaluate what is missing of a trial.

        Parameters
        ----------
        within
            Told the share of the samples that is done.
        again
            Evaluate what there is, too.

        Raises
        ------
        InfiniGenError
            The model cannot run it, or its data is not there.
        """

        def progress(items: Sequence[Any], description: str) -> Iterable[Any]:
            for number, item in enumerate(items):
                within(number / len(items))
                yield item

        store = self._fresh_store if again else self._store
        return self._evaluate(trial, trial.samples, store, progress)

    def kept(self, trial: Trial) -> int:
        """Samples of a trial that all of its policies have from earlier."""
        return samples_kept(
            self._subject(trial),
            self._task(trial),
            trial.policies,
            self._store,
            limit=trial.samples,
        )

    def wanted(self, trial: Trial) -> int:
        """Samples that a trial has once it is finished."""
        return min(len(self._task(trial)), trial.samples or len(self._task(trial)))

    def partly(self, trial: Trial) -> Points | None:
        """A trial's results as far as it has got, nothing evaluated; None without any sample."""
        count = self.kept(trial)
        return self._evaluate(trial, count, self._store) if count else None

    def _evaluate(
        self,
        trial: Trial,
        limit: int | None,
        store: PointStore,
        progress: Progress = no_progress,
    ) -> Points:
        points = evaluate(
            self._subject(trial),
            self._task(trial),
            trial.policies,
            limit=limit,
            store=store,
            progress=progress,
        )
        return {point.policy: point for point in points}

    def _subject(self, trial: Trial) -> Subject:
        calibration = self._calibration if trial.skewed else without_skew(self._calibration)
        config = self._calibration.config(**dict(trial.settings))
        return Subject(self.model, calibration, config, trial.storage, trial.budget, self._identity)

    def _task(self, trial: Trial) -> Task:
        key = (trial.task, trial.options)
        if key not in self._tasks:
            inputs = Inputs(self._tokenizer, self.positions, self._data, trial.options)
            self._tasks[key] = make_task(trial.task, inputs)
        return self._tasks[key]
