"""``infinigen-kv figures accuracy``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinigen_kv.cli.files import ensure_folder, read_text
from infinigen_kv.cli.loading import calibrated, load, read_calibration
from infinigen_kv.cli.options import JsonOption, ModelOptions
from infinigen_kv.cli.output import say
from infinigen_kv_lab.cli.figure_sets import (
    AgainOption,
    CalibrationOption,
    OutOption,
    check_packages,
    command_line,
    report,
    short_name,
)

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.accuracy.setting import AccuracyScale


@dataclass(frozen=True, kw_only=True)
class AccuracyOptions:
    """What `accuracy` takes beside the model; as the command line names it."""

    data: Annotated[
        Path,
        typer.Option(
            "--data",
            metavar="DIR",
            help="Folder of the tasks' files, as for `infinigen-kv eval`.",
            show_default=False,
        ),
    ]
    out: OutOption
    figures: Annotated[
        str | None,
        typer.Option(
            "--figures",
            metavar="LIST",
            help="table-1, 4, 5, 7, 11, 12, 13, table-2, 19, 20 (the paper's), passkey, needles, "
            "speculation, codecs. [default: all]",
            show_default=False,
        ),
    ] = None
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Fewer and shorter windows: about ten minutes with a small model."
        ),
    ] = False
    again: AgainOption = False
    windows: Annotated[
        int | None,
        typer.Option(
            "--windows",
            metavar="N",
            min=1,
            help="Windows of a text for each figure. [default: 4 to 8, quick 1 or 2]",
            show_default=False,
        ),
    ] = None
    documents: Annotated[
        int | None,
        typer.Option(
            "--documents",
            metavar="N",
            min=1,
            help="Documents of each few-shot task. [default: 200, quick 4]",
            show_default=False,
        ),
    ] = None
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text that the model itself is looked at with, and that needles are hidden in. "
            "[default: WikiText-2 and a book of the data folder]",
            show_default=False,
        ),
    ] = None
    calibration: CalibrationOption = None


def accuracy(
    *,
    json: JsonOption = False,
    options: AccuracyOptions,
    target: ModelOptions,
) -> None:
    """How good answers stay: the paper's Tables 1 and 2 and its Figures 4, 5, 7, 11, 12, 13, 19 and
    20, retrieval, the speculation itself, and packed homes.

    Every finished sample is kept in the folder and not measured again, so an interrupted run goes
    on. A figure whose data is not there is left out, and said.
    """
    from infinigen_kv_lab.figures.accuracy.data import check_data_folder
    from infinigen_kv_lab.figures.catalogue import choose_figures

    chosen = choose_figures("accuracy", options.figures)
    check_data_folder(options.data)
    if options.text is not None:
        read_text(options.text, option="--text")
    scale = _scale(options)
    check_packages()
    ensure_folder(options.out, option="--out")
    given = read_calibration(options.calibration)
    loaded = load(target)

    from infinigen_kv_lab.figures.accuracy.rig import AccuracyRig
    from infinigen_kv_lab.figures.accuracy.setting import AccuracySetting
    from infinigen_kv_lab.figures.run import FigureOrder, make_figures
    from infinigen_kv_lab.points import FOLDER

    calibration = calibrated(loaded, given)
    points = options.out / FOLDER
    rig = AccuracyRig(loaded.model, loaded.tokenizer, calibration, options.data, points)
    setting = AccuracySetting(
        scale=scale.within(rig.positions), model=short_name(target.model), text=options.text
    )
    order = FigureOrder(
        figures=chosen,
        folder=options.out,
        command=command_line("accuracy", options, target),
        again=options.again,
    )
    outcome = make_figures(order, setting, rig, say)
    report(outcome, [figure.name for figure in chosen], json=json)


def _scale(options: AccuracyOptions) -> AccuracyScale:
    from infinigen_kv_lab.figures.accuracy.setting import FULL_SCALE, QUICK_SCALE

    scale = (QUICK_SCALE if options.quick else FULL_SCALE).with_windows(options.windows)
    return scale if options.documents is None else replace(scale, documents=options.documents)
