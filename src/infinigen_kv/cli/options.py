"""Options that several subcommands share, and what they stand for."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinigen_kv.config import OWN_DEFAULTS, PROMPT_CHUNK, InfiniGenConfig
from infinigen_kv.errors import InputError

if TYPE_CHECKING:
    import torch

    from infinigen_kv.calibration.artefact import Calibration

DTYPES = ("float32", "bfloat16", "float16")


def _own(field: str) -> str:
    """Default of a setting that each rehearsal has a value of its own for."""
    values = [f"{defaults[field]} ({name})" for name, defaults in OWN_DEFAULTS.items()]
    return f"[default: {', '.join(values)}]"


def _common(field: str) -> str:
    return f"[default: {getattr(InfiniGenConfig(), field)}]"


def _selection(option: str, metavar: str, text: str) -> Any:
    return typer.Option(option, metavar=metavar, help=text, show_default=False)


JsonOption = Annotated[
    bool, typer.Option("--json", help="End stdout with one line that holds a JSON object.")
]


PromptChunkOption = Annotated[
    str,
    typer.Option(
        "--prompt-chunk",
        metavar="N|none",
        help="Tokens of the prompt that are read at once, at most; none (or 0): all.",
    ),
]
DEFAULT_CHUNK = str(PROMPT_CHUNK)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and how to load it."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="smollm2 (the embedded model), a Hugging Face folder, a .gguf file, or a name on "
            "the Hugging Face hub.",
            show_default=False,
        ),
    ]
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(DTYPES),
            help="Type of the weights. [default: the model's own]",
            show_default=False,
        ),
    ] = None
    device: Annotated[
        str,
        typer.Option(metavar="DEVICE", help="cpu, cuda or cuda:N."),
    ] = "cpu"
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Let code that comes with the model run.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """The fields of `InfiniGenConfig` under the names of the command line; None if not given."""

    calibration: Annotated[
        Path | None,
        _selection(
            "--calibration",
            "DIR",
            "What `infinigen-kv calibrate --output DIR` wrote. [default: the one in the user's "
            "cache, made if there is none]",
        ),
    ] = None
    rehearsal: Annotated[
        str | None,
        _selection(
            "--rehearsal",
            "|".join(OWN_DEFAULTS),
            f"How the next layer's scores are predicted. {_common('rehearsal')}",
        ),
    ] = None
    alpha: Annotated[
        float | None,
        _selection(
            "--alpha",
            "A",
            "Attend to tokens whose predicted score is within A of the highest (>= 0). "
            + _own("alpha"),
        ),
    ] = None
    partial_ratio: Annotated[
        float | None,
        _selection(
            "--partial-ratio",
            "R",
            "Share of the head dimension that the prediction uses, in (0, 1]. "
            + _own("partial_ratio"),
        ),
    ] = None
    index_bits: Annotated[
        str | None,
        _selection(
            "--index-bits",
            "BITSxN+...",
            "Keep what the prediction scores as codes of few bits: dimensions by their bits (4, 3 "
            "or 2), e.g. 3x16+2x32. In the place of --partial-ratio. [default: the model's type]",
        ),
    ] = None
    max_fetch: Annotated[
        float | None,
        _selection(
            "--max-fetch",
            "F",
            f"Largest share of the cache to attend to, in (0, 1]. {_common('max_fetch')}",
        ),
    ] = None
    recent: Annotated[
        int | None,
        _selection(
            "--recent", "N", f"Newest tokens, always attended to (>= 0). {_own('recent_tokens')}"
        ),
    ] = None
    sinks: Annotated[
        int | None,
        _selection(
            "--sinks", "N", f"Oldest tokens, always attended to (>= 0). {_own('sink_tokens')}"
        ),
    ] = None
    min_context: Annotated[
        int | None,
        _selection(
            "--min-context",
            "N",
            f"Below this many tokens everything is attended to (>= 1). {_common('min_context')}",
        ),
    ] = None
    tail: Annotated[
        bool | None,
        typer.Option(
            "--tail/--no-tail",
            help="Estimate what is not attended to from the partial keys, or give it no weight. "
            "[default: --tail (calibrated), --no-tail (paper)]",
            show_default=False,
        ),
    ] = None
    refit_every: Annotated[
        int | None,
        _selection(
            "--refit-every",
            "N",
            "Decoded tokens after which the rehearsal is fitted anew (0: never). "
            f"{_own('refit_every')}",
        ),
    ] = None

    def given(self) -> list[str]:
        """Names of the options that were typed."""
        return [_typed(name) for name, value in asdict(self).items() if value is not None]

    def config(self, calibration: Calibration | None = None) -> InfiniGenConfig:
        """Validated settings; errors name the option as it was typed.

        What was tuned for the model (``tune``) stands for options that were not given.
        """
        values = {
            _FIELDS.get(name, name): value
            for name, value in asdict(self).items()
            if name != "calibration" and value is not None
        }
        try:
            return (
                InfiniGenConfig(**values) if calibration is None else calibration.config(**values)
            )
        except InputError as error:
            field, _, rest = str(error).partition("=")
            options = {_FIELDS.get(name, name): _typed(name) for name in asdict(self)}
            if field not in options:
                raise
            # a flag is typed without a value
            raise InputError(f"{options[field]} {rest.removeprefix('True ')}") from error


_FIELDS = {"recent": "recent_tokens", "sinks": "sink_tokens"}


def _typed(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_dtype(name: str | None) -> torch.dtype | None:
    """The type that ``--dtype`` names; None for the model's own."""
    if name is None:
        return None
    if name not in DTYPES:
        raise InputError(f"--dtype {name!r} is not valid: it must be one of {', '.join(DTYPES)}")
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def parse_prompt_chunk(text: str) -> int | None:
    """What ``--prompt-chunk`` says; None for the whole prompt at once."""
    number = re.fullmatch(r"[0-9]{1,18}", text.strip())
    if number is not None:
        return int(text) or None
    if text.strip().lower() != "none":
        raise InputError(
            f"--prompt-chunk {text!r} is not valid: it must be a number of tokens like "
            f"{DEFAULT_CHUNK}, or none for the whole prompt at once"
        )
    return None


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command's parameters that are dataclasses to typer field by field.

    A command declares ``selection: SelectionOptions`` and typer sees an option for each field.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Any]] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation)
    }
    flat = []
    for name, parameter in signature.parameters.items():
        if name in groups:
            flat += _field_parameters(groups[name])
        else:
            flat.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    run.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def _field_parameters(group: type[Any]) -> list[inspect.Parameter]:
    annotations = inspect.get_annotations(group, eval_str=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=annotations[field.name],
        )
        for field in fields(group)
    ]
