"""``infinigen-kv tune``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinigen_kv.cli.files import ensure_folder, read_text
from infinigen_kv.cli.loading import calibrated, check_fit, load, read_calibration
from infinigen_kv.cli.options import JsonOption, ModelOptions
from infinigen_kv.cli.output import percent, print_json, say, table
from infinigen_kv.errors import InputError
from infinigen_kv.progress import bar

if TYPE_CHECKING:
    from infinigen_kv.calibration import Calibration
    from infinigen_kv.calibration.tuned import Tuned
    from infinigen_kv.diagnosis import Verdict
    from infinigen_kv.tuning.options import TuneOptions


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
        float,
        typer.Option(
            "--max-fetch", metavar="F", help="Largest share of the cache to attend to, in (0, 1]."
        ),
    ] = 0.3
    partial_ratio: Annotated[
        float | None,
        typer.Option(
            "--partial-ratio",
            metavar="R",
            help="Share of the head dimension that the prediction uses, in (0, 1]. "
            "[default: 0.375]",
            show_default=False,
        ),
    ] = None
    resident: Annotated[
        str | None,
        typer.Option(
            "--resident",
            metavar="SIZE",
            help="Resident set to tune for, as in `bench`. [default: 20%]",
            show_default=False,
        ),
    ] = None
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
        from infinigen_kv.tuning.options import TuneOptions

        values = {name: value for name, value in asdict(self).items() if name != "text"}
        if self.resident is not None:
            values["resident"] = parse_size("--resident", self.resident)
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
    json: JsonOption = False,
    wanted: TuningOptions,
    target: ModelOptions,
) -> None:
    """Choose each layer's alpha for this model: a wanted KL for the fewest bytes over the link.

    The settings are stored beside the calibration, and every command uses them from then on.
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
        from infinigen_kv.tuning.run import check_positions

        check_positions(loaded.model, options)
    made = calibrated(loaded, given)
    folder = calibration or _cached(made)
    if forget:
        replace(made, tuned=None).save(folder)
        say("the defaults are used again")
        return
    from infinigen_kv.diagnosis import judge
    from infinigen_kv.tuning import tune as search
    from infinigen_kv.tuning.search import evidence

    found = search(loaded.model, loaded.tokenizer, made, options, texts, progress=bar)
    assert found.tuned is not None
    found.save(folder)
    _print(found.tuned, target.model)
    verdict = judge(evidence(found))
    if verdict.level != "suitable":
        _print_doubts(verdict, target.model)
    typer.echo(f"stored in {folder}; used from now on, `tune --forget` goes back")
    if json:
        print_json({"model": target.model, "artefact": str(folder), **found.tuned.to_dict()})


def _check_replaceable(folder: Path) -> None:
    """Refuse now what could not be stored after minutes of tuning."""
    from infinigen_kv.calibration.artefact import check_target

    check_target(folder)


def _cached(made: Calibration) -> Path:
    from infinigen_kv.calibration.run import cached_folder

    return cached_folder(made.fingerprint, made.settings)


def _print(tuned: Tuned, model: str) -> None:
    found: dict[str, Any] = dict(tuned.measured)
    single = found["single_alpha"]
    table(
        f"{model}: alpha by layer",
        ["layers", "alpha"],
        [[layers, f"{alpha:g}"] for layers, alpha in _runs(tuned.alpha, found["layers"])],
    )
    table(
        "what it costs, per decode step",
        ["text", "KL (nats)", "link MB", "fetched"],
        [
            _cost("held back", found["kl"], found["link_bytes"], found["fetched_share"]),
            _cost("tuned on", found["kl_tuned_on"], found["link_bytes_tuned_on"], None),
            _cost(
                f"one alpha of {single['alpha']:.2f} for all layers, tuned on (interpolated)",
                found["kl_tuned_on"],
                single["link_bytes"],
                single["fetched_share"],
            ),
        ],
    )
    saved = found["bytes_saved"]
    typer.echo(
        f"{abs(saved):.0%} {'fewer' if saved >= 0 else 'more'} bytes than one alpha for all "
        "layers".replace("%", " %")
    )
    if not found["reached"]:
        typer.echo(
            f"The target of {tuned.target_kl:g} nats is out of reach: the least that was measured "
            f"is {found['least_kl']:.3g}. Raise --max-fetch or --partial-ratio, or accept a larger "
            "--target-kl; `infinigen-kv diagnose` says which layers are to blame."
        )


def _print_doubts(verdict: Verdict, model: str) -> None:
    """Why selection does not pay on this model, or hardly."""
    typer.echo(f"This model is {verdict.level}:")
    for reason in verdict.reasons:
        typer.echo(f"  - {reason}")
    typer.echo(f"`infinigen-kv diagnose {model}` measures every layer and says what would help.")


def _cost(text: str, kl: float, moved: float, share: float | None) -> list[str]:
    return [text, f"{kl:.4f}", f"{moved / 1e6:.3f}", "-" if share is None else percent(share)]


def _runs(alphas: tuple[float, ...], layers: list[int]) -> list[tuple[str, float]]:
    """Neighbouring layers of one alpha together."""
    runs: list[tuple[list[int], float]] = []
    for layer in layers:
        alpha = alphas[layer]
        if runs and runs[-1][1] == alpha and runs[-1][0][-1] == layer - 1:
            runs[-1][0].append(layer)
        else:
            runs.append(([layer], alpha))
    return [
        (str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}", alpha)
        for each, alpha in runs
    ]
