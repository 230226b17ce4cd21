"""The laboratory's subcommands of ``infinigen-kv``: one module each.

Nothing here imports torch or transformers at the top: help and usage errors come at once.
"""

from __future__ import annotations

import typer

from infinigen_kv.cli.options import expand_groups
from infinigen_kv_lab.cli.bench import bench
from infinigen_kv_lab.cli.demo import demo
from infinigen_kv_lab.cli.diagnose import diagnose
from infinigen_kv_lab.cli.eval import evaluate
from infinigen_kv_lab.cli.fidelity import fidelity
from infinigen_kv_lab.cli.figures import figures
from infinigen_kv_lab.cli.tune import tune


def add_commands(app: typer.Typer) -> None:
    """Add them to the program's; named by the package's entry point."""
    for name, command, summary in (
        ("demo", demo, "Answer from a long prompt, with the full cache and without."),
        ("fidelity", fidelity, "Measure what the selection changes on a text."),
        ("bench", bench, "Time decode steps of several policies side by side."),
        ("diagnose", diagnose, "Say whether the selection suits a model, and what is weak."),
        ("tune", tune, "Choose settings for a model: a wanted accuracy for the fewest bytes."),
        ("eval", evaluate, "Measure how good answers stay: perplexity, tasks, retrieval."),
    ):
        app.command(name, short_help=summary)(expand_groups(command))
    app.add_typer(figures)
