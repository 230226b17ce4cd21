"""The command ``infinigen-kv``: one module per subcommand.

Nothing here imports torch or transformers at the top: help and usage errors come at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from infinigen_kv.cli.calibrate import calibrate
from infinigen_kv.cli.generate import generate
from infinigen_kv.cli.options import expand_groups
from infinigen_kv.cli.plan import plan
from infinigen_kv.cli.program import DEBUG_VARIABLE, Program
from infinigen_kv_lab.cli.bench import bench
from infinigen_kv_lab.cli.demo import demo
from infinigen_kv_lab.cli.diagnose import diagnose
from infinigen_kv_lab.cli.eval import evaluate
from infinigen_kv_lab.cli.fidelity import fidelity
from infinigen_kv_lab.cli.figures import figures
from infinigen_kv_lab.cli.tune import tune

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
for command, summary in (
    (demo, "Answer from a long prompt, with the full cache and without."),
    (calibrate, "Prepare a model, once (the others do it by themselves)."),
    (tune, "Choose settings for a model: a wanted accuracy for the fewest bytes."),
    (generate, "Continue a prompt with a selected cache."),
    (fidelity, "Measure what the selection changes on a text."),
    (diagnose, "Say whether the selection suits a model, and which layers are weak."),
    (bench, "Time decode steps of several policies side by side."),
    (plan, "Say what a run needs of memory, and which setting to change."),
):
    app.command(short_help=summary)(expand_groups(command))
app.command("eval", short_help="Measure how good answers stay: perplexity, tasks, retrieval.")(
    expand_groups(evaluate)
)
app.add_typer(figures)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"infinigen-kv {version('infinigen-kv')}")
        raise typer.Exit


@app.callback()
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


def main() -> None:
    """Run the command line; leaves through `SystemExit`."""
    app(prog_name="infinigen-kv")


__all__ = ["app", "main"]
