"""``infinigen-kv tune``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinigen_kv.cli.files import ensure_folder, read_text
from infinigen_kv.cli.loading import calibrated, check_fit, load, read_calibration
from infinigen_kv.cli.options import JsonOption, ModelOptions
from infinigen_kv.cli.output import print_json, say
from infinigen_kv.cli.storage_options import parse_layers
from infinigen_kv.errors import InputError
from infinigen_kv.progress import bar
from infinigen_kv_lab.cli.tune_report import print_tuned

if TYPE_CHECKING:
    from infinigen_kv.calibration.artefact import Calibration
    from infinigen_kv.models.loading import LoadedModel
    from infinigen_kv_lab.diagnosis import Verdict
    from infinigen_kv_lab.tuning.measurements import Measurements
    from infinigen_kv_lab.tuning.options import TuneOptions


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """What is wanted, and on which text."""

    target_kl: Annotated[
        float,
        typer.Option(
            "--target-kl",
            metavar="NATS",
            help="Largest KL(full || selected) of the next token that is acceptable.",
        ),
    ] = 0.02
    max_fetch: Annotated[
        float | None,
        typer.Option(
            "--max-fetch",
            metavar="F",
            help="Largest share of the cache to attend to, in (0, 1]. [default: 0.3, or the "
            "resident set's share if that is less and reaches the target]",
            show_default=False,
        ),
    ] = None
    partial_ratio: Annotated[
        float | None,
        typer.Option(
            "--partial-ratio",
            metavar="R",
            help="Share of the head dimension that the prediction uses, in (0, 1]. "
            "[default: the best of 0.25, 0.375 and 0.5 in the same device memory]",
            show_default=False,
        ),
    ] = None
    resident: Annotated[
        str | None,
        typer.Option(
            "--resident",
            metavar="SIZE",
            help="Resident set to tune for and to use, as in `bench`; partial ratio and resident "
            "layers then stay as they are. [default: 20%, less what a larger partial ratio or "
            "resident layers take]",
            show_default=False,
        ),
    ] = None
    resident_layers: Annotated[
        str | None,
        typer.Option(
            "--resident-layers",
            metavar="auto|none|I,J,...",
            help="Layers to keep on the device whole, as in `bench`. [default: auto, and more "
            "where that moves less in the same device memory]",
            show_default=False,
        ),
    ] = None
    alpha_only: Annotated[
        bool,
        typer.Option(
            "--alpha-only",
            help="Try no other partial ratio, resident layers or largest share: half the time.",
        ),
    ] = False
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="UTF-8 text to tune on, half of it held back to check with; may be given several "
            "times. [default: docstrings and source of Python's standard library]",
            show_default=False,
        ),
    ] = None
    prompt_tokens: Annotated[
        int,
        typer.Option(
            "--prompt-tokens", metavar="P", min=32, help="Tokens before those that select."
        ),
    ] = 2048
    decode_tokens: Annotated[
        int,
        typer.Option("--decode-tokens", metavar="T", min=2, help="Tokens of a window that select."),
    ] = 144
    windows: Annotated[
        int,
        typer.Option(
            "--windows",
            metavar="N",
            min=1,
            help="Windows of text to tune on, and as many to check with.",
        ),
    ] = 4

    def options(self) -> TuneOptions:
        """Validated; errors name the option as it was typed."""
        from infinigen_kv.cli.sizes import parse_size
        from infinigen_kv_lab.tuning.options import TuneOptions

        values = {name: value for name, value in asdict(self).items() if name != "text"}
        if self.resident is not None:
            values["resident"] = parse_size("--resident", self.resident)
        if self.resident_layers is not None:
            values["resident_layers"] = parse_layers(self.resident_layers)
        try:
            made = TuneOptions(**values)
            made.config()
            _ = made.storage
        except InputError as error:
            field, separator, reason = str(error).partition("=")
            if not separator or field not in values:
                raise
            raise InputError(f"--{field.replace('_', '-')} {reason}") from error
        return made


def tune(
    *,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            metavar="DIR",
            help="What `infinigen-kv calibrate --output DIR` wrote; the settings are stored there. "
            "[default: the one in the user's cache, made if there is none]",
            show_default=False,
        ),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Go back to the defaults: drop what was tuned before.")
    ] = False,
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Measure anew what an earlier run for this model left in the user's cache.",
        ),
    ] = False,
    json: JsonOption = False,
    wanted: TuningOptions,
    target: ModelOptions,
) -> None:
    """Choose each layer's alpha for this model: a wanted KL for the fewest bytes over the link.

    Also the partial ratio and layers to keep on the device whole, where that pays in the same
    device memory. The settings are stored beside the calibration, and every command uses them from
    then on. Measurements are kept: an interrupted run goes on, and one for another KL is short.
    """
    options = wanted.options()
    texts = [read_text(path, option="--text") for path in wanted.text] if wanted.text else None
    given = read_calibration(calibration, with_tuned=False)
    if calibration is not None:
        ensure_folder(calibration.absolute().parent, option="--calibration")
        _check_replaceable(calibration)
    loaded = load(target)
    check_fit(loaded, given, None, 1)
    if not forget:
        from infinigen_kv_lab.tuning.run import check_positions

        check_positions(loaded.model, options)
    made = calibrated(loaded, given)
    folder = calibration or _cached(made)
    if forget:
        replace(made, tuned=None).save(folder)
        say("the defaults are used again")
        return
    from infinigen_kv_lab.diagnosis import judge
    from infinigen_kv_lab.tuning import tune as search
    from infinigen_kv_lab.tuning.report import evidence

    kept = _kept(loaded, made, again=again)
    found = search(loaded.model, loaded.tokenizer, made, options, texts, kept=kept, progress=steps)
    assert found.tuned is not None
    found.save(folder)
    print_tuned(found.tuned, target.model)
    verdict = judge(evidence(found))
    if verdict.level != "suitable":
        _print_doubts(verdict, target.model)
    typer.echo(f"stored in {folder}; used from now on, `tune --forget` goes back")
    if json:
        print_json({"model": target.model, "artefact": str(folder), **found.tuned.to_dict()})


def steps(items: Sequence[Any], description: str) -> Iterable[Any]:
    """A bar, and a line where stderr is no terminal: tuning takes minutes."""
    if not sys.stderr.isatty():
        say(f"{description} ({len(items)} steps) ...")
    return bar(items, description)


def _kept(loaded: LoadedModel, made: Calibration, *, again: bool) -> Measurements:
    """What earlier runs measured, in the user's cache."""
    from infinigen_kv_lab.tuning.measurements import Measurements, default_folder, dependencies

    about = dependencies(loaded.model, made)
    try:
        return Measurements(default_folder(about), about, again=again)
    except InputError as error:
        say(f"measurements are not kept for next time: {error}")
        return Measurements()


def _check_replaceable(folder: Path) -> None:
    """Refuse now what could not be stored after minutes of tuning."""
    from infinigen_kv.calibration.artefact import check_target

    check_target(folder)


def _cached(made: Calibration) -> Path:
    from infinigen_kv.calibration.run import cached_folder

    return cached_folder(made.fingerprint, made.settings)


def _print_doubts(verdict: Verdict, model: str) -> None:
    """Why selection does not pay on this model, or hardly."""
    typer.echo(f"This model is {verdict.level}:")
    for reason in verdict.reasons:
        typer.echo(f"  - {reason}")
    typer.echo(f"`infinigen-kv diagnose {model}` measures every layer and says what would help.")
