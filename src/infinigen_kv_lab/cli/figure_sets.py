"""What the subcommands of ``infinigen-kv figures`` share."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinigen_kv.cli.options import ModelOptions
from infinigen_kv.cli.output import print_json, say
from infinigen_kv.errors import InputError

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.run import Outcome

OutOption = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Folder for everything that is written.",
        show_default=False,
    ),
]
AgainOption = Annotated[bool, typer.Option("--again", help="Measure finished points again, too.")]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="DIR",
        help="What `infinigen-kv calibrate --output DIR` wrote. [default: the one in the user's "
        "cache, made if there is none]",
        show_default=False,
    ),
]


def check_packages() -> None:
    """What draws and writes, before anything is measured."""
    from infinigen_kv_lab.figures.drawing import require_matplotlib
    from infinigen_kv_lab.figures.page import require_jinja2

    require_matplotlib()
    require_jinja2()


def short_name(model: str) -> str:
    """A model's name without the folders around it."""
    return Path(model).name or model


def command_line(subcommand: str, options: Any, target: ModelOptions) -> str:
    """What was typed, in one order and without what has its default.

    ``options`` are a dataclass whose fields are named as the options are.
    """
    words = ["infinigen-kv", "figures", subcommand, target.model]
    values = {**vars(options), **vars(target)}
    defaults: dict[str, Any] = {}
    for group in (options, target):
        defaults |= {field.name: field.default for field in fields(group)}
    for name, value in values.items():
        option = "--" + name.replace("_", "-")
        if name == "model" or value == defaults[name]:
            continue
        for each in value if isinstance(value, list) else [value]:
            words += [option] if each is True else [option, str(each)]
    return shlex.join(words)


def report(outcome: Outcome, chosen: Sequence[str], *, json: bool) -> None:
    """Say what was written, and why other figures were not.

    Raises
    ------
    InputError
        If none of the ``chosen`` figures could be drawn.
    KeyboardInterrupt
        Again, where an interruption ended the measuring.
    """
    for name, why in outcome.missing.items():
        say(f"figure {name} is not drawn: {why}")
    if outcome.interrupted:
        say(f"finished points are kept: the same command goes on ({outcome.page})")
        raise KeyboardInterrupt
    if not any(name in outcome.files for name in chosen):
        raise InputError("none of the figures could be drawn; the reasons are above")
    if json:
        print_json(
            {
                "page": str(outcome.page),
                "figures": {name: list(map(str, files)) for name, files in outcome.files.items()},
                "missing": outcome.missing,
            }
        )
        return
    for files in outcome.files.values():
        typer.echo(str(files[0]))
    typer.echo(str(outcome.page))
