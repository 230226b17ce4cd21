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
    from infinigen_kv.calibration.artefact import Calibration

MIB = 2**20


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
    cost = _cost(made, folder)
    _print_report(made, cost, folder)
    if json:
        print_json(
            {
                "model": target.model,
                "artefact": str(folder),
                "settings": dict(made.settings),
                "layers": dict(made.report),
                "cost": cost,
            }
        )


def _check_output(folder: Path) -> None:
    from infinigen_kv.calibration.artefact import check_target

    check_target(folder)


def _cost(made: Calibration, folder: Path) -> dict[str, dict[str, float]]:
    """That of the artefact, which knows what saving took; `made`'s own where it was not kept."""
    from infinigen_kv.calibration.artefact import Calibration
    from infinigen_kv.errors import CalibrationError

    try:
        return dict(Calibration.load(folder).cost)
    except CalibrationError:
        return dict(made.cost)


def _print_report(made: Calibration, cost: dict[str, dict[str, float]], folder: Path) -> None:
    rows = [
        [layer, percent(values["own_weights"]), percent(values["unexplained"])]
        for layer, values in made.report.items()
    ]
    table(
        "share of the query's power that the prediction misses",
        ["layer", "own weights", "with correction"],
        rows,
    )
    if cost:
        _print_cost(cost)
    typer.echo(f"artefact: {folder}")


def _print_cost(cost: dict[str, dict[str, float]]) -> None:
    rows = [
        [stage, f"{each['seconds']:.2f}", f"{each['peak_bytes'] / MIB:.1f}"]
        for stage, each in cost.items()
    ]
    total = sum(each["seconds"] for each in cost.values())
    most = max(each["peak_bytes"] for each in cost.values())
    rows.append(["all", f"{total:.2f}", f"{most / MIB:.1f}"])
    columns = ["stage", "seconds", "MiB beyond the start"]
    table("what calibrating took when it was done", columns, rows)
