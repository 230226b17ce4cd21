"""``infinigen-kv calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinigen_kv.cli.files import ensure_folder, read_text
from infinigen_kv.cli.loading import load
from infinigen_kv.cli.options import JsonOption, ModelOptions
from infinigen_kv.cli.output import percent, print_json, table
from infinigen_kv.progress import bar

if TYPE_CHECKING:
    from infinigen_kv.calibration import Calibration


def calibrate(
    *,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="UTF-8 text to calibrate on; may be given several times. "
            "[default: docstrings and source of Python's standard library]",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="DIR",
            help="Folder for the artefact. [default: the user's cache, where it is found again]",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", metavar="N", min=1, help="Tokens to use at most. [default: 16384]"
        ),
    ] = None,
    json: JsonOption = False,
    target: ModelOptions,
) -> None:
    """Learn from sample text what the rehearsal needs to know about a model, once per model."""
    texts = [read_text(path, option="--text") for path in text] if text else None
    if output is not None:
        ensure_folder(output.absolute().parent, option="--output")
        _check_output(output)
    loaded = load(target)
    from infinigen_kv.calibration.run import DEFAULT_TOKENS, cached_folder
    from infinigen_kv.calibration.run import calibrate as fit

    made = fit(loaded.model, loaded.tokenizer, texts, tokens=tokens or DEFAULT_TOKENS, progress=bar)
    folder = made.save(output) if output else cached_folder(made.fingerprint, made.settings)
    _print_report(made, folder)
    if json:
        print_json(
            {
                "model": target.model,
                "artefact": str(folder),
                "settings": dict(made.settings),
                "layers": dict(made.report),
            }
        )


def _check_output(folder: Path) -> None:
    from infinigen_kv.calibration.artefact import check_target

    check_target(folder)


def _print_report(made: Calibration, folder: Path) -> None:
    rows = [
        [layer, percent(values["own_weights"]), percent(values["unexplained"])]
        for layer, values in made.report.items()
    ]
    table(
        "share of the query's power that the prediction misses",
        ["layer", "own weights", "with correction"],
        rows,
    )
    typer.echo(f"artefact: {folder}")
