"""Trials that look at the model itself, which no policy changes."""

from __future__ import annotations

from dataclasses import replace

from infinigen_kv_lab.evals.reading import FULL
from infinigen_kv_lab.evals.task import TaskOptions
from infinigen_kv_lab.figures.accuracy.definition import AccuracySetting
from infinigen_kv_lab.figures.accuracy.trial import Trial


def look(setting: AccuracySetting, task: str) -> Trial:
    """A few windows of the length that perplexities are measured on."""
    scale = setting.scale
    return setting.reading(task, (FULL,), replace(scale.text, windows=scale.looks))


def look_at_contexts(setting: AccuracySetting) -> Trial:
    """The attention at several context lengths (`infinigen_kv_lab.evals.sparsity`)."""
    options = TaskOptions(lengths=setting.scale.contexts, text=setting.text)
    return setting.trial("sparsity", (FULL,), options, setting.scale.looks)
