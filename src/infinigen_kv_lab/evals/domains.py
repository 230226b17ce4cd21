"""Perplexity of texts from other domains than a calibration's: source code, and German."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from types import MappingProxyType

import torch
from torch import Tensor

from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.data import data_files, digest, read_utf8
from infinigen_kv_lab.evals.perplexity import PerplexityTask
from infinigen_kv_lab.evals.task import Inputs
from infinigen_kv_lab.evals.windows import split_window

DOMAINS = MappingProxyType(
    {
        "code": (
            (".py", ".cpp", ".c", ".h", ".java", ".js", ".go", ".rs"),
            "long source files (of any of these languages)",
        ),
        "german": ((".txt",), "long German texts as UTF-8"),
    }
)
"""By name of task and folder: the endings of its files, and what they are."""


def domain(name: str, inputs: Inputs) -> PerplexityTask:
    """Windows of all files of the data folder's folder ``name``, by turns.

    A window holds text of one file, and windows of the files follow one another by turns, so that
    a limit leaves out none of them. What is left of a file after its last whole window is not used.

    Raises
    ------
    InputError
        If there are no files, or none has a whole window.
    """
    endings, what = DOMAINS[name]
    files = data_files(inputs.data, name, endings, task=name, what=what)
    texts = [read_utf8(path) for path in files]
    window, prompt = split_window(inputs)
    ids = [torch.tensor(inputs.tokenizer(text, verbose=False)["input_ids"]) for text in texts]
    windows = _by_turns([_windows(each, window) for each in ids])
    if not windows:
        longest = max(each.numel() for each in ids)
        raise InputError(
            f"task {name!r}: the longest of its {len(files)} files has {longest} tokens, which is "
            f"no whole window of {window}: choose a smaller window"
        )
    return PerplexityTask(
        name, torch.cat(windows), window=window, prompt_tokens=prompt, source=digest(*texts)
    )


def _windows(ids: Tensor, window: int) -> Sequence[Tensor]:
    whole = ids.numel() // window * window
    return ids[:whole].split(window) if whole else ()


def _by_turns(files: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [each for turn in zip_longest(*files) for each in turn if each is not None]
