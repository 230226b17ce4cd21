"""The options of ``infinigen-kv eval``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinigen_kv.errors import InputError
from infinigen_kv_lab.cli.eval_tasks import FEW_SHOT, LENGTHS, POLICIES, parse_lengths

if TYPE_CHECKING:
    from infinigen_kv_lab.evals.task import TaskOptions


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """What is measured, in which homes, and where the figures are kept."""

    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            metavar="LIST",
            help="wikitext2, ptb, code, german, text, passkey, needles, extraction, speculation, "
            "similarity, attention, sparsity, skew, "
            f"copa, openbookqa, winogrande, piqa, rte ({FEW_SHOT}: these five), or lm-eval:NAME "
            "for any other task of lm-evaluation-harness; separated by commas.",
            show_default=False,
        ),
    ]
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DIR",
            help="Folder of the tasks' files. [default: none; the few-shot tasks then come from "
            "the Hugging Face hub]",
            show_default=False,
        ),
    ] = None
    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            metavar="LIST",
            help="What to compare, separated by commas; ideal is the full cache.",
        ),
    ] = POLICIES
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="SHARE",
            help="Share of the cached tokens for the policies with a fixed budget, e.g. 10% or "
            "0.1. [default: 20%]",
            show_default=False,
        ),
    ] = None
    capacities: Annotated[
        str | None,
        typer.Option(
            "--capacities",
            metavar="LIST",
            help="Several of --capacity, e.g. 10%,50%,none, each measured on its own; with "
            "--codecs every one with each codec.",
            show_default=False,
        ),
    ] = None
    codecs: Annotated[
        str | None,
        typer.Option(
            "--codecs",
            metavar="LIST",
            help="Several of --codec, e.g. none,int8,int4. Add --resident-layers none to compare "
            "them in the same layers.",
            show_default=False,
        ),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            help="Windows, prompts or documents of each task at most. [default: all]",
            show_default=False,
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder where measurements are kept, one JSON file per task and policy; what is "
            "there already is not measured again. [default: nothing is kept]",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ContentOptions:
    """What the tasks' texts and prompts are made of."""

    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            metavar="N",
            min=2,
            help="Texts: tokens of a window. [default: 3072, or the model's positions where it has "
            "fewer]",
            show_default=False,
        ),
    ] = None
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--prompt-tokens",
            metavar="P",
            min=1,
            help="Texts: tokens at the start of a window that are read in full. [default: two "
            "thirds of it]",
            show_default=False,
        ),
    ] = None
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text of the tasks text, needles and those that look into the model.",
            show_default=False,
        ),
    ] = None
    lengths: Annotated[
        str,
        typer.Option(
            "--lengths",
            metavar="LIST",
            help="Needles, extraction, sparsity: tokens of the contexts.",
        ),
    ] = LENGTHS
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats", metavar="N", min=1, help="Needles and extraction: contexts per length."
        ),
    ] = 5
    ask_later: Annotated[
        bool,
        typer.Option(
            "--ask-later",
            help="Passkey: ask once the cache is built, in decode steps, instead of in the prompt.",
        ),
    ] = False
    shots: Annotated[
        int,
        typer.Option("--shots", metavar="K", min=0, help="Harness: solved examples in a prompt."),
    ] = 5
    exact_prefix: Annotated[
        int,
        typer.Option(
            "--exact-prefix",
            metavar="N",
            min=1,
            help="Harness: tokens at the start of a prompt that are read in full.",
        ),
    ] = 128
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Of needles, lists and shots.")
    ] = 1234

    def options(self) -> TaskOptions:
        """Validated; errors name the option as it was typed."""
        from infinigen_kv_lab.evals.task import TaskOptions

        values: dict[str, Any] = {**asdict(self), "lengths": parse_lengths(self.lengths)}
        values["asked_later"] = values.pop("ask_later")
        try:
            return TaskOptions(**values)
        except InputError as error:
            field, _, rest = str(error).partition("=")
            raise InputError(f"--{field.replace('_', '-')} {rest}") from error
