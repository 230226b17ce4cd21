"""``infinigen-kv figures``: one subcommand for each set of figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinigen_kv.calibration.texts import documentation_text
from infinigen_kv.cli.files import ensure_folder, read_text
from infinigen_kv.cli.loading import calibrated, load, read_calibration
from infinigen_kv.cli.options import JsonOption, ModelOptions, expand_groups, parse_dtype
from infinigen_kv.cli.output import say
from infinigen_kv.errors import InputError
from infinigen_kv_lab.cli.accuracy import accuracy
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
    from infinigen_kv_lab.figures.speed.peer_results import PeerResults
    from infinigen_kv_lab.figures.speed.rig import SpeedRig
    from infinigen_kv_lab.figures.speed.setting import SpeedScale, SpeedSetting
    from infinigen_kv_lab.figures.speed.subject import Subject

AUTO = "auto"
UNPACED = "emulated:1000000"  # counts bytes and keeps nobody waiting

figures = typer.Typer(
    name="figures",
    rich_markup_mode=None,
    help="Measure and draw sets of figures, each set on one page.",
)


@dataclass(frozen=True, kw_only=True)
class SpeedOptions:
    """What `speed` takes beside the model; as the command line names it."""

    out: OutOption
    figures: Annotated[
        str | None,
        typer.Option(
            "--figures",
            metavar="LIST",
            help="14, 15, 16a, 16b, 17, 18 (the paper's), link, resident, pareto, memory. "
            "[default: all]",
            show_default=False,
        ),
    ] = None
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Fewer and smaller points: some minutes with a small model."),
    ] = False
    again: AgainOption = False
    models: Annotated[
        str | None,
        typer.Option(
            "--models",
            metavar="LIST",
            help="Further models for 16b. [default: MODEL with fewer layers]",
            show_default=False,
        ),
    ] = None
    peers: Annotated[
        list[Path] | None,
        typer.Option(
            "--peers",
            metavar="FILE",
            help="Results that a script of benchmarks/peers wrote; may be repeated.",
            show_default=False,
        ),
    ] = None
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--prompt-tokens",
            metavar="P",
            min=32,
            help="Longest prompt. [default: 4096, quick 1024]",
            show_default=False,
        ),
    ] = None
    decode_tokens: Annotated[
        int | None,
        typer.Option(
            "--decode-tokens",
            metavar="T",
            min=1,
            help="Measured steps of the headline figures. [default: 64, quick 6]",
            show_default=False,
        ),
    ] = None
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text of the prompts. [default: the documentation of the Python language]",
            show_default=False,
        ),
    ] = None
    link: Annotated[
        str,
        typer.Option(
            "--link",
            metavar="auto|none|emulated:GB/s[,us]|emulated:paper",
            help="What entries cross; auto: emulated:paper on a CPU, the machine's own on a GPU.",
        ),
    ] = AUTO
    calibration: CalibrationOption = None


def speed(
    *,
    json: JsonOption = False,
    options: SpeedOptions,
    target: ModelOptions,
) -> None:
    """Latency, throughput and bytes of every system: the paper's Figures 14 to 18, and others.

    Finished points are kept in the folder and not measured again, so an interrupted run goes on.
    """
    from infinigen_kv_lab.figures.catalogue import choose_figures
    from infinigen_kv_lab.figures.speed.peer_results import read_peer_results

    chosen = choose_figures("speed", options.figures)
    peer_results = tuple(read_peer_results(path) for path in options.peers or ())
    scale = _scale(options)
    text = documentation_text()
    if options.text is not None:
        text = read_text(options.text, option="--text")
    _check_link(options.link)
    check_packages()
    ensure_folder(options.out, option="--out")
    rig = _rig(options, target, text)

    from infinigen_kv_lab.figures.run import FigureOrder, make_figures
    from infinigen_kv_lab.figures.speed.rig import write_prompt

    setting = _setting(options, rig, scale, peer_results)
    write_prompt(options.out, setting, rig)
    order = FigureOrder(
        figures=chosen,
        folder=options.out,
        command=command_line("speed", options, target),
        again=options.again,
    )
    outcome = make_figures(order, setting, rig, say)
    report(outcome, [figure.name for figure in chosen], json=json)


figures.command(short_help="The paper's speed figures, and some beyond.")(expand_groups(speed))
figures.command(short_help="The paper's accuracy figures, and some beyond.")(
    expand_groups(accuracy)
)


def _scale(options: SpeedOptions) -> SpeedScale:
    from infinigen_kv_lab.figures.speed.setting import FULL_SCALE, QUICK_SCALE

    scale = QUICK_SCALE if options.quick else FULL_SCALE
    return scale.resized(options.prompt_tokens, options.decode_tokens)


def _check_link(link: str) -> None:
    from infinigen_kv.storage.link import LinkSpec

    if link == AUTO:
        return
    try:
        LinkSpec.parse(link)
    except InputError as error:
        raise InputError(f"--{str(error).replace('=', ' ', 1)}; or auto") from error


def _rig(options: SpeedOptions, target: ModelOptions, text: str) -> SpeedRig:
    given = read_calibration(options.calibration)
    loaded = load(target)
    from infinigen_kv.calibration.run import calibrate
    from infinigen_kv.models.loading import load_model
    from infinigen_kv_lab.figures.speed.rig import SpeedRig
    from infinigen_kv_lab.figures.speed.subject import Subject
    from infinigen_kv_lab.points import FOLDER, PointStore

    calibration = calibrated(loaded, given)
    main = Subject(loaded.model, loaded.tokenizer, calibration, short_name(target.model))

    def another(name: str) -> Subject:
        # quietly: the bar of all points is on the terminal meanwhile
        other = load_model(
            name,
            dtype=parse_dtype(target.dtype),
            device=target.device,
            trust_remote_code=target.trust_remote_code,
        )
        own = calibrate(other.model, other.tokenizer)
        return Subject(other.model, other.tokenizer, own, short_name(name))

    return SpeedRig(main, another, text, PointStore(options.out / FOLDER, say))


def _setting(
    options: SpeedOptions,
    rig: SpeedRig,
    scale: SpeedScale,
    peer_results: tuple[PeerResults, ...],
) -> SpeedSetting:
    """Everything that the figures need to know; measures the paper's link if it is wanted."""
    from infinigen_kv.policies.registry import POLICIES
    from infinigen_kv_lab.bench.peers import PEERS
    from infinigen_kv_lab.figures.speed.peer_results import prompt_digest
    from infinigen_kv_lab.figures.speed.setting import SpeedSetting

    subject = rig.main
    scale = scale.within(subject.positions)
    on_gpu = rig.device.type == "cuda"
    link = options.link
    if link == AUTO:
        link = "none" if on_gpu else "emulated:paper"
    if link == "emulated:paper":
        # the figures of a page share it, so that a new one goes with all of them only
        again = options.again and options.figures is None
        link = rig.paper_link(scale.prompt_tokens, say, again=again)
    models = [name.strip() for name in (options.models or "").split(",") if name.strip()]
    return SpeedSetting(
        scale=scale,
        link=link,
        counting_link="none" if on_gpu else UNPACED,
        policies=rig.runnable(tuple(POLICIES), say),
        peers=PEERS,
        layers=subject.layers,
        model=subject.name,
        models=tuple(models),
        peer_results=peer_results,
        prompt_digest=prompt_digest(rig.prompt(subject, 1, scale.prompt_tokens)[0].tolist()),
    )
