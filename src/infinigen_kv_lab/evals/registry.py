"""Tasks by name. Their modules are imported on first use."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib import import_module

from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.task import Inputs, Task

HARNESS_PREFIX = "lm-eval:"
"""What comes after it is the name of a task, tag or group of lm-evaluation-harness."""

TASKS: dict[str, tuple[str, str]] = {
    "wikitext2": ("perplexity:wikitext2", "perplexity on WikiText-2, raw test split"),
    "ptb": ("perplexity:penn_treebank", "perplexity on Penn Treebank, validation split"),
    "code": ("domains:domain", "perplexity on source code"),
    "german": ("domains:domain", "perplexity on German texts"),
    "text": ("perplexity:own_text", "perplexity on the file of --text"),
    "passkey": ("passkey:passkey", "a five-digit key in irrelevant text"),
    "needles": ("needles:needles", "several numbers in a text, asked for one after the other"),
    "extraction": ("extraction:extraction", "forms out of a long list, field by field"),
    "copa": ("fewshot:local_task", "COPA, through lm-evaluation-harness"),
    "openbookqa": ("fewshot:local_task", "OpenBookQA, through lm-evaluation-harness"),
    "winogrande": ("fewshot:local_task", "WinoGrande, through lm-evaluation-harness"),
    "piqa": ("fewshot:local_task", "PIQA, through lm-evaluation-harness"),
    "rte": ("fewshot:local_task", "RTE, through lm-evaluation-harness"),
    "speculation": ("speculation:speculation", "the rehearsal itself, by layer and head"),
    "similarity": ("similarity:similarity", "inputs of consecutive layers beside each other"),
    "attention": ("attention:attention", "attention over what is kept beside the full cache's"),
    "sparsity": ("sparsity:sparsity", "tokens that the attention needs, by layer and length"),
    "skew": ("skewing:skewing", "columns of queries and keys before and after the paper's skew"),
}
"""By name: the function ``(name, inputs) -> Task`` in this package, and one line about it."""


def make_task(name: str, inputs: Inputs) -> Task:
    """The task ``name``, its data read and checked.

    Raises
    ------
    InputError
        There is no such task (says which name is near), or its data or options are not right.
    """
    check_task(name)
    home = "fewshot:harness_task" if name.startswith(HARNESS_PREFIX) else TASKS[name][0]
    module, _, function = home.partition(":")
    factory: Callable[[str, Inputs], Task] = getattr(
        import_module(f"infinigen_kv_lab.evals.{module}"), function
    )
    return factory(name.removeprefix(HARNESS_PREFIX), inputs)


def check_task(name: str) -> str:
    """The name, if there is such a task; what the harness knows is not looked up here."""
    if name in TASKS or (name.startswith(HARNESS_PREFIX) and name != HARNESS_PREFIX):
        return name
    near = difflib.get_close_matches(name, TASKS, n=2, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise InputError(
        f"task {name!r} is not known: {hint}there are {', '.join(TASKS)}, and {HARNESS_PREFIX}NAME "
        "for any other task of lm-evaluation-harness"
    )
