"""The program: the engine's subcommands, and those that other packages bring."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated

import typer

from infinigen_kv.cli.calibrate import calibrate
from infinigen_kv.cli.generate import generate
from infinigen_kv.cli.options import expand_groups
from infinigen_kv.cli.plan import plan
from infinigen_kv.cli.program import DEBUG_VARIABLE, Program

COMMANDS = "infinigen_kv.commands"
"""Entry points of packages with subcommands: each names a function that adds them to an app."""


def make_app() -> typer.Typer:
    """The program with every subcommand there is."""
    app = typer.Typer(
        name="infinigen-kv",
        cls=Program,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Speculative selection of the KV cache (InfiniGen) for Hugging Face models.",
        epilog="Exit codes: 0 done, 1 a fault of the program, 2 bad usage or input.",
    )
    app.callback()(_program)
    for command, summary in (
        (calibrate, "Prepare a model, once (the others do it by themselves)."),
        (generate, "Continue a prompt with a selected cache."),
        (plan, "Say what a run needs of memory, and which setting to change."),
    ):
        app.command(short_help=summary)(expand_groups(command))
    for point in entry_points(group=COMMANDS):
        point.load()(app)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"infinigen-kv {version('infinigen-kv')}")
        raise typer.Exit


def _program(
    debug: Annotated[  # read by `Program` from the context
        bool,
        typer.Option("--debug", envvar=DEBUG_VARIABLE, help="Show the traceback of an error."),
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    return None
