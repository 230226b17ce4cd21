"""What an accuracy figure is, and what its trials are made from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from infinigen_kv_lab.evals.reading import FULL
from infinigen_kv_lab.evals.task import Result, TaskOptions
from infinigen_kv_lab.figures.accuracy.scale import AccuracyScale, Span
from infinigen_kv_lab.figures.accuracy.trial import Points, Trial
from infinigen_kv_lab.figures.definition import Row
from infinigen_kv_lab.kit.intervals import Estimate

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

Found = Mapping[Trial, Points]
"""Results of the trials that there are."""

ResultT = TypeVar("ResultT", bound=Result)

COMPARED = (FULL, "infinigen", "infinigen-paper", "h2o")
SHARE = 0.1  # of the cached tokens for h2o, where it does not vary: about what infinigen fetches
EVERYTHING = 1e3  # an alpha within which all tokens are: then max_fetch alone says how many


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracySetting:
    """What all trials of a run have in common.

    Parameters
    ----------
    scale
        How much is measured, already cut to what the model can read.
    model
        The model's name.
    text
        A file to read instead of WikiText-2, where a figure needs any text.
    """

    scale: AccuracyScale
    model: str
    text: Path | None = None

    def reading(self, task: str, policies: Sequence[str], span: Span, **changes: Any) -> Trial:
        """A trial on windows of a text."""
        options = TaskOptions(window=span.window, prompt_tokens=span.prompt_tokens, text=self.text)
        return self.trial(task, policies, options, span.windows, **changes)

    @staticmethod
    def trial(
        task: str,
        policies: Sequence[str],
        options: TaskOptions,
        samples: int | None,
        *,
        settings: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Trial:
        """Any trial; ``settings`` are fields of `InfiniGenConfig`."""
        return Trial(
            task=task,
            policies=tuple(policies),
            options=options,
            samples=samples,
            settings=tuple((settings or {}).items()),
            **changes,
        )


class AccuracyFigure(ABC):
    """One figure: its trials, its table, its picture.

    ``name`` is what ``--figures`` takes, ``title`` stands above the picture, ``about`` below it on
    the page. ``intervals`` says whether there are any in the picture.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    about: ClassVar[str]
    intervals: ClassVar[bool] = True

    @abstractmethod
    def trials(self, setting: AccuracySetting) -> list[Trial]:
        """What must be evaluated; trials of other figures are shared."""

    @abstractmethod
    def rows(self, setting: AccuracySetting, found: Found) -> list[Row]:
        """The table, of those trials that there are; empty where they do not make a figure."""

    @abstractmethod
    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        """Draw the table."""

    def remarks(self, setting: AccuracySetting, rows: Sequence[Row]) -> list[str]:
        """Sentences for the page that the table gives rise to."""
        return []


def results_of(found: Found, trial: Trial, kind: type[ResultT]) -> dict[str, ResultT]:
    """A trial's results by policy, which are of this kind; empty where it was not evaluated."""
    results = {name: point.result for name, point in found.get(trial, {}).items()}
    assert all(isinstance(each, kind) for each in results.values())
    return cast("dict[str, ResultT]", results)


def spread(name: str, estimate: Estimate | None, scale: float = 1.0) -> dict[str, float | None]:
    """Columns of a figure with its interval, times ``scale``."""
    if estimate is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    values = {"": estimate.value, "_low": estimate.low, "_high": estimate.high}
    return {f"{name}{end}": scale * value for end, value in values.items()}


def interval(row: Row, name: str) -> str:
    """The interval of a column of `spread` in words, to follow it; empty where there is none."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    if low is None or high is None or not math.isfinite(low + high):
        return ""
    return f" ({low:.3f} to {high:.3f})"
