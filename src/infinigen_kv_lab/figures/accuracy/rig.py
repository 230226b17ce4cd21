"""Evaluates: the model, its data, and what is kept of earlier runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.calibration.fingerprint import model_digest
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.progress import Progress, no_progress
from infinigen_kv_lab.evals.registry import make_task
from infinigen_kv_lab.evals.run import Subject, evaluate, samples_kept
from infinigen_kv_lab.evals.skewing import without_skew
from infinigen_kv_lab.evals.store import SampleStore
from infinigen_kv_lab.evals.task import Inputs, Task, TaskOptions
from infinigen_kv_lab.figures.accuracy.evaluation import Evaluation, Points
from infinigen_kv_lab.figures.accuracy.figure import AccuracyFigure, Results
from infinigen_kv_lab.figures.accuracy.setting import SHARE, AccuracySetting
from infinigen_kv_lab.figures.figure import Figure
from infinigen_kv_lab.figures.machine import processor
from infinigen_kv_lab.figures.rig import Basis, Description, MeasurementRig
from infinigen_kv_lab.figures.worklist import ShareDone, unheeded

UNITS = {"passkey": "prompts", "needles": "contexts"}
UNITS |= dict.fromkeys(("copa", "openbookqa", "winogrande", "piqa", "rte"), "documents")


class AccuracyRig(MeasurementRig[AccuracySetting, Evaluation, Points]):
    """Evaluates what accuracy figures are made of.

    Parameters
    ----------
    model, tokenizer, calibration
        The model, not attached.
    data
        Folder of the tasks' files.
    points
        Folder in which every finished sample is kept.
    """

    figure_set = "accuracy"

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
        self._store = SampleStore(points)
        self._fresh_store = SampleStore(points, reuse=False)
        self._tasks: dict[tuple[str, TaskOptions], Task] = {}

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    @property
    def positions(self) -> int | None:
        """Tokens that the model can tell apart; None for no limit."""
        return adapter_for(self.model).max_positions

    def missing(self, measurement: Evaluation) -> float:
        """Share of an evaluation's samples that not all of its policies have from earlier."""
        available = len(self._task(measurement))
        return 1 - self._kept(measurement) / min(available, measurement.samples or available)

    def measure(
        self, measurement: Evaluation, done: ShareDone = unheeded, *, again: bool = False
    ) -> Points:
        """Evaluate what is missing; see `MeasurementRig.measure`."""

        def progress(items: Sequence[Any], description: str) -> Iterable[Any]:
            for number, item in enumerate(items):
                done(number / len(items))
                yield item

        store = self._fresh_store if again else self._store
        return self._evaluate(measurement, measurement.samples, store, progress)

    def partial(self, measurement: Evaluation) -> Points | None:
        """Results as far as it has got, nothing evaluated; None without any sample."""
        count = self._kept(measurement)
        return self._evaluate(measurement, count, self._store) if count else None

    def cost(self, measurement: Evaluation) -> float:
        """Seconds, up to a factor."""
        return measurement.expected_seconds()

    def describe(self, setting: AccuracySetting) -> Description:
        """Model and windows; see `MeasurementRig.describe`."""
        text, sweep = setting.scale.text, setting.scale.sweep
        return Description(
            facts={
                "model": setting.model,
                "dtype": self._dtype,
                "device": processor(self.device),
            },
            settings={
                "model": setting.model,
                "type": self._dtype,
                "perplexities": f"windows of {text.window} tokens, the first {text.prompt_tokens} "
                f"read in full; {text.windows} at most",
                "sweeps": f"windows of {sweep.window} tokens; {sweep.windows} at most",
                "intervals": "95 %, bootstrap over windows, prompts or documents; none from one "
                "alone",
                "budget of h2o": f"{100 * SHARE:g} % of the cached tokens, where it does not vary",
            },
        )

    def basis(
        self,
        setting: AccuracySetting,
        figure: Figure[AccuracySetting, Evaluation, Points],
        results: Results,
    ) -> Basis:
        """Samples that a figure rests on."""
        rests = rests_on(list(results.values()))
        intervals = isinstance(figure, AccuracyFigure) and figure.intervals
        resampled = " | intervals of 95 %, bootstrap over these" if intervals else ""
        footer = f"{setting.model}, {self._dtype} | {rests}{resampled}"
        return Basis(footer, [f"Measured on: {rests}."])

    @property
    def _dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def _kept(self, measurement: Evaluation) -> int:
        """Samples that all of the policies have from earlier."""
        subject, task = self._subject(measurement), self._task(measurement)
        limit = measurement.samples
        return samples_kept(subject, task, measurement.policies, self._store, limit=limit)

    def _evaluate(
        self,
        measurement: Evaluation,
        limit: int | None,
        store: SampleStore,
        progress: Progress = no_progress,
    ) -> Points:
        points = evaluate(
            self._subject(measurement),
            self._task(measurement),
            measurement.policies,
            limit=limit,
            store=store,
            progress=progress,
        )
        return {point.policy: point for point in points}

    def _subject(self, measurement: Evaluation) -> Subject:
        own = self._calibration
        return Subject(
            self.model,
            own if measurement.skewed else without_skew(own),
            own.config(**dict(measurement.settings)),
            measurement.storage,
            measurement.budget,
            self._identity,
        )

    def _task(self, measurement: Evaluation) -> Task:
        key = (measurement.task, measurement.options)
        if key not in self._tasks:
            inputs = Inputs(self._tokenizer, self.positions, self._data, measurement.options)
            self._tasks[key] = make_task(measurement.task, inputs)
        return self._tasks[key]


def rests_on(results: Sequence[Points]) -> str:
    """How many samples of each task a figure rests on, in words; of unequal ones the fewest."""
    counts: dict[str, tuple[int, int]] = {}
    for point in (point for points in results for point in points.values()):
        own = (point.samples, point.available)
        counts[point.task] = min(counts.get(point.task, own), own)
    return ", ".join(
        f"{task}: {some} of {every} {UNITS.get(task, 'windows')}"
        for task, (some, every) in counts.items()
    )
