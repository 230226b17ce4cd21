"""Tasks of lm-evaluation-harness, its multiple-choice questions with solved examples above all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv_lab.evals.data import digest
from infinigen_kv_lab.evals.harness import usable
from infinigen_kv_lab.evals.reading import Reader
from infinigen_kv_lab.evals.task import (
    Costs,
    Inputs,
    Result,
    Sample,
    Task,
    costs,
    fetched,
    fetched_of,
    percent,
)
from infinigen_kv_lab.kit.intervals import Estimate, difference, share

if TYPE_CHECKING:
    from infinigen_kv_lab.evals.harness.replay import HarnessRun, Metric


@dataclass(frozen=True, slots=True)
class Accuracy(Result):
    """The harness's figures, with intervals by bootstrap over documents.

    ``metrics`` by name, ``differences`` to the full cache on the same documents. Of ``selecting``
    documents a prompt was long enough for a selection. ``by_document`` are the metrics of each
    document, ``full_by_document`` those of the full cache; neither is in the JSON.
    """

    documents: int
    selecting: int
    metrics: dict[str, Estimate]
    differences: dict[str, Estimate]
    fetched_share: float
    fetched_share_all_layers: float
    costs: Costs
    by_document: dict[str, tuple[float, ...]] = field(default_factory=dict, repr=False)
    full_by_document: dict[str, tuple[float, ...]] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is undefined is None."""
        found = Result.to_dict(self)
        del found["by_document"], found["full_by_document"]
        return found

    def headline(self) -> dict[str, str]:
        figures = {}
        for name, value in self.metrics.items():
            apart = self.differences.get(name)
            figures[name] = str(value)
            figures[f"{name} less full"] = "-" if apart is None else str(apart)
        selecting = f"{self.selecting} of {self.documents}"
        return {
            **figures,
            "selecting": selecting,
            "fetched": percent(self.fetched_share),
            **self.costs.headline(),
        }


class HarnessTask(Task):
    """One task of the harness; a sample is a document with all of its requests.

    Prompts are short, so that the selection starts where the exact prefix ends, whatever
    ``min_context`` says, and the always-kept window is limited to a sixteenth of that prefix: it
    alone would be more than a tenth of such a prompt.
    """

    def __init__(
        self, name: str, run: HarnessRun, inputs: Inputs, settings: dict[str, Any]
    ) -> None:
        self.name = name
        self._run = run
        self._inputs = inputs
        self._exact = inputs.options.exact_prefix
        self._settings = settings

    @property
    def settings(self) -> dict[str, Any]:
        return self._settings

    def __len__(self) -> int:
        return len(self._run.documents)

    def config(self, base: InfiniGenConfig) -> InfiniGenConfig:
        return replace(
            base,
            min_context=min(base.min_context, self._exact),
            recent_tokens=min(base.recent_tokens, max(1, self._exact // 16)),
        )

    def measure(self, reader: Reader, index: int, shared: Any) -> Sample:
        from infinigen_kv_lab.evals.harness.model import DEFAULT_WINDOW, InfiniGenLM

        model = InfiniGenLM(
            lambda: nullcontext(reader),
            self._inputs.tokenizer,
            exact_prefix=self._exact,
            max_length=self._inputs.max_positions or DEFAULT_WINDOW,
        )
        requests = self._run.documents[index]
        answers: list[Any] = [None] * len(requests)
        for kind in dict.fromkeys(request.kind for request in requests):
            places = [at for at, request in enumerate(requests) if request.kind == kind]
            instances = [SimpleNamespace(args=requests[at].arguments) for at in places]
            given = getattr(model, kind)(instances, disable_tqdm=True)
            for at, answer in zip(places, given, strict=True):
                answers[at] = answer
        return {"answers": answers, **fetched_of(reader)}

    def summarise(
        self, samples: Sequence[Sample], full: Sequence[Sample] | None = None
    ) -> Accuracy:
        mine = self._metrics(samples)
        theirs = {} if full is None else self._metrics(full)
        ours, reference = _by_document(mine), _by_document(theirs)
        differences = {
            name: difference(values, reference[name], [1.0] * len(values))
            for name, values in ours.items()
            if name in reference
        }
        selecting, all_layers = fetched(samples)
        return Accuracy(
            documents=len(samples),
            selecting=sum(each["fetched"] is not None for each in samples),
            metrics={name: _estimate(metric) for name, metric in mine.items()},
            differences=differences,
            fetched_share=selecting,
            fetched_share_all_layers=all_layers,
            costs=costs(samples),
            by_document=ours,
            full_by_document=reference,
        )

    def _metrics(self, samples: Sequence[Sample]) -> dict[str, Metric]:
        found = self._run.metrics([each["answers"] for each in samples])
        return {metric.name: metric for metric in found}


def local_task(name: str, inputs: Inputs) -> HarnessTask:
    """One of the paper's five tasks: from the data folder, or without one from the hub."""
    if inputs.data is None:
        return harness_task(name, inputs)
    used = usable()
    from infinigen_kv_lab.evals.harness.local import local_config, local_documents

    documents = local_documents(name, inputs.data)
    from infinigen_kv_lab.evals.harness.replay import HarnessRun

    options = inputs.options
    described = local_config(name, documents)
    run = HarnessRun(described, shots=options.shots, seed=options.seed)
    return HarnessTask(name, run, inputs, _settings(inputs, used, digest(str(documents))))


def harness_task(name: str, inputs: Inputs) -> HarnessTask:
    """A task by the harness's own name; its data comes from the hub."""
    used = usable()
    from infinigen_kv_lab.evals.harness.replay import HarnessRun

    options = inputs.options
    run = HarnessRun(name, shots=options.shots, seed=options.seed)
    asked = digest(*(request.key for requests in run.documents for request in requests))
    return HarnessTask(name, run, inputs, _settings(inputs, used, asked))


def _settings(inputs: Inputs, harness: str, text: str) -> dict[str, Any]:
    options = inputs.options
    return {
        "lm_eval": harness,
        "text": text,
        "shots": options.shots,
        "exact_prefix": options.exact_prefix,
        "seed": options.seed,
    }


def _by_document(metrics: dict[str, Metric]) -> dict[str, tuple[float, ...]]:
    """Those that are means over documents."""
    return {name: each.documents for name, each in metrics.items() if each.documents is not None}


def _estimate(metric: Metric) -> Estimate:
    if metric.documents is None:
        return Estimate(metric.value, math.nan, math.nan)
    return share(metric.documents, [1.0] * len(metric.documents))
