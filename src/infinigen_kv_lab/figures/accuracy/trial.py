"""One evaluation that figures are made of: a task, policies, and the settings they run with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infinigen_kv.policies.settings import BUDGET
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv_lab.evals.run import Point
from infinigen_kv_lab.evals.task import TaskOptions

Points = Mapping[str, Point]
"""What an evaluation gave, by policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
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


def _brief(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
