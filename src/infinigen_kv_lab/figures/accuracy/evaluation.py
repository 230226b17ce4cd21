"""One evaluation that figures are made of: a task, policies, and the settings they run with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infinigen_kv.policies.settings import BUDGET
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv_lab.evals.run import Point
from infinigen_kv_lab.evals.task import TaskOptions
from infinigen_kv_lab.evals.windows import DEFAULT_WINDOW

Points = Mapping[str, Point]
"""What an evaluation gave, by policy."""

# Of a 135M model on one core; only their relations matter.
TOKEN_SECONDS = 4e-3
LONG_TOKENS = 4000  # at which attention doubles what reading one costs
STEP_SECONDS = 0.06  # of one token by itself
SAMPLE_TOKENS = {"passkey": 3000, "rte": 600, "piqa": 400, "copa": 250, "openbookqa": 300}
SAMPLES = 30  # where all of a task's are wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What is evaluated, the model apart.

    Parameters
    ----------
    task
        A name of `infinigen_kv_lab.evals.registry.TASKS`.
    policies
        Names of `policies.registry.POLICIES`.
    options
        Settings of the task.
    samples
        Windows, prompts or documents at most; None for all.
    settings
        Fields of `InfiniGenConfig` with their values, where they are not the model's own.
    storage
        Codec and capacity.
    budget
        Of the policies with a fixed one.
    skewed
        Whether the paper's rehearsal skews.
    """

    task: str
    policies: tuple[str, ...]
    options: TaskOptions
    samples: int | None
    settings: tuple[tuple[str, Any], ...] = ()
    storage: StorageConfig = field(default_factory=StorageConfig)
    budget: float = BUDGET
    skewed: bool = True

    @property
    def kind(self) -> str:
        """The task."""
        return self.task

    @property
    def label(self) -> str:
        """For a line of progress."""
        parts = [self.task, ", ".join(self.policies)]
        parts += [f"{name.replace('_', ' ')} {_brief(value)}" for name, value in self.settings]
        if self.budget != BUDGET:
            parts.append(f"budget {self.budget:g}")
        if self.storage.capacity is not None:
            parts.append(f"capacity {self.storage.capacity:g}, {self.storage.evict}")
        if self.storage.codec != "none":
            parts.append(self.storage.codec)
        return "; ".join(parts if self.skewed else [*parts, "no skew"])

    def expected_seconds(self) -> float:
        """Its time, up to a factor that all of a model share."""
        options = self.options
        runs = (self.samples or SAMPLES) * len(self.policies)
        window = options.window or DEFAULT_WINDOW
        if self.task in ("needles", "sparsity"):
            window = sum(options.lengths) // len(options.lengths)
        window = SAMPLE_TOKENS.get(self.task, window)
        total = runs * TOKEN_SECONDS * window * (1 + window / LONG_TOKENS)
        if self.storage.capacity is not None or self.storage.codec != "none":
            decoded = window - (options.prompt_tokens or window * 2 // 3)
            total += runs * decoded * STEP_SECONDS
        return total


def _brief(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
