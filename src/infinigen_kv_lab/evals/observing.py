"""What tasks share that look into the model while it reads windows of a text in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.data import data_file, digest, read_utf8
from infinigen_kv_lab.evals.reading import FULL
from infinigen_kv_lab.evals.task import Inputs, Sample, Task
from infinigen_kv_lab.kit.intervals import Estimate, share

DEFAULT_TEXT = "wikitext2/wiki.test.raw"


@dataclass(frozen=True, slots=True)
class ByLayer:
    """A figure's mean over layers, with its interval over windows, and its values by layer."""

    mean: Estimate
    values: list[float]


class WindowTask(Task):
    """Non-overlapping windows of one text.

    Parameters
    ----------
    name
        Of the task.
    ids
        ``(n,)`` token ids, at least one window.
    window
        Tokens of a window.
    source
        What else identifies the text.

    Raises
    ------
    InputError
        If the text is too short.
    """

    def __init__(self, name: str, ids: Tensor, *, window: int, source: str) -> None:
        self.name = name
        if ids.numel() < window:
            raise InputError(
                f"task {name!r}: the text has {ids.numel()} tokens, which is no whole window of "
                f"{window}: choose a smaller window or a longer text"
            )
        self._windows = ids[: ids.numel() // window * window].view(-1, window)
        self._source = source

    @property
    def settings(self) -> dict[str, Any]:
        return {"text": self._source, "window": self._windows.shape[1]}

    def __len__(self) -> int:
        return len(self._windows)


class ModelTask(WindowTask):
    """Looks at the model itself, which no policy changes: only `reading.FULL` suits."""

    def suits(self, policy: str) -> bool:
        """Whether it is the full cache."""
        return policy == FULL


def read_ids(name: str, inputs: Inputs) -> tuple[Tensor, str]:
    """Token ids ``(n,)`` of the user's text, or of WikiText-2, and the text's short name.

    Raises
    ------
    InputError
        If there is neither; says what to fetch and where to put it.
    """
    path = inputs.options.text or data_file(
        inputs.data, DEFAULT_TEXT, task=name, what="a long text (or name one with --text FILE)"
    )
    text = read_utf8(path)
    return torch.tensor(inputs.tokenizer(text, verbose=False)["input_ids"]), digest(text)


def by_layer(samples: Sequence[Sample], name: str) -> ByLayer:
    """Of samples that hold a list over layers under ``name``; None in it counts as no value."""
    table = np.array([each[name] for each in samples], dtype=np.float64)  # (windows, layers)
    means = [float(np.nanmean(row)) for row in table]
    return ByLayer(share(means, [1.0] * len(means)), np.nanmean(table, axis=0).tolist())
