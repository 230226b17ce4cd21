"""``infinigen-kv diagnose``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinigen_kv.calibration.texts import documentation_text
from infinigen_kv.cli.files import ensure_folder, read_text, write_text
from infinigen_kv.cli.loading import (
    calibrated,
    check_fit,
    load,
    read_calibration,
    selected_config,
)
from infinigen_kv.cli.options import JsonOption, ModelOptions, SelectionOptions
from infinigen_kv.cli.output import print_json, say
from infinigen_kv.errors import InputError
from infinigen_kv.progress import bar

if TYPE_CHECKING:
    from infinigen_kv.calibration.artefact import Calibration
    from infinigen_kv.config import InfiniGenConfig
    from infinigen_kv.models.loading import LoadedModel
    from infinigen_kv_lab.diagnosis import Diagnosis, Windows

HELD_BACK = "the documentation of the Python language, which calibration does not read"
PROMPT, DECODED, WINDOWS = 2048, 256, 2


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Which text, and how much of it."""

    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="A UTF-8 text like those that the model will read; one that it was not "
            f"calibrated on. [default: {HELD_BACK}]",
            show_default=False,
        ),
    ] = None
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--prompt-tokens",
            metavar="P",
            min=1,
            help="Tokens at the start of a window that are read in full. "
            f"[default: {PROMPT}, or what the model's positions leave]",
            show_default=False,
        ),
    ] = None
    decode_tokens: Annotated[
        int | None,
        typer.Option(
            "--decode-tokens",
            metavar="T",
            min=32,
            help="Tokens after them, which select. "
            f"[default: {DECODED}, or a quarter of the model's positions if that is less]",
            show_default=False,
        ),
    ] = None
    windows: Annotated[
        int,
        typer.Option(
            "--windows", metavar="N", min=1, help="Windows to read, spread over the text, at most."
        ),
    ] = WINDOWS

    def read(self) -> str:
        """The user's text, or the one that is held back."""
        return documentation_text() if self.text is None else read_text(self.text, option="--text")

    def sizes(self, positions: int | None) -> tuple[int, int]:
        """Tokens before and after the end of a window's prompt, for a model's positions."""
        limit = positions or PROMPT + DECODED
        decoded = self.decode_tokens or max(32, min(DECODED, limit // 4))
        prompt = self.prompt_tokens or max(1, min(PROMPT, limit - decoded))
        return prompt, decoded


def diagnose(
    *,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Also write the report as a page.", show_default=False
        ),
    ] = None,
    json: JsonOption = False,
    reading: TextOptions,
    selection: SelectionOptions,
    target: ModelOptions,
) -> None:
    """Say whether InfiniGen suits a model, which of its layers are weak, why, and what would help.

    Reads text that the calibration has not seen, with full attention and with selection.
    """
    config = selection.config()
    _check_html(html)
    text = (
        documentation_text() if reading.text is None else read_text(reading.text, option="--text")
    )
    given = read_calibration(selection.calibration)
    loaded = load(target)
    windows = _windows(loaded, text, reading, config, given)
    made = calibrated(loaded, given)
    _warn_if_seen(made, text)
    config = selected_config(selection, made)
    from infinigen_kv_lab.diagnosis import diagnose as measure

    found = measure(loaded.model, made, windows, config, progress=bar)
    facts = _facts(found, reading, loaded, target)
    if html is not None:
        from infinigen_kv_lab.diagnosis.page import render_page

        command = _command(html, reading, selection, target)
        title = f"InfiniGen on {Path(target.model).name or target.model}"
        write_text(html, render_page(found, title=title, command=command, facts=facts))
    from infinigen_kv_lab.cli.diagnosis_report import print_report

    print_report(
        found, f"{target.model}, {found.evidence.config.rehearsal} rehearsal, {facts['text']}"
    )
    if html is not None:
        typer.echo(str(html))
    if json:
        page = None if html is None else str(html)
        print_json({"model": target.model, **facts, **found.to_dict(), "html": page})


def _check_html(html: Path | None) -> None:
    """What the page needs, before anything is measured."""
    if html is None:
        return
    from infinigen_kv_lab.diagnosis.page import require_packages

    require_packages()
    if html.is_dir():
        raise InputError(f"--html {html}: a folder: name a file in it")
    ensure_folder(html.absolute().parent, option="--html")


def _windows(
    loaded: LoadedModel,
    text: str,
    reading: TextOptions,
    config: InfiniGenConfig,
    given: Calibration | None,
) -> Windows:
    """The windows to read; what cannot be measured is said before the model is calibrated."""
    from infinigen_kv.models.adapters import adapter_for
    from infinigen_kv_lab.diagnosis import Windows
    from infinigen_kv_lab.diagnosis.measure import check_measurable

    adapter = adapter_for(loaded.model)
    prompt, decoded = reading.sizes(adapter.max_positions)
    ids = loaded.tokenizer(text, verbose=False)["input_ids"]
    windows = Windows.spread(ids, prompt=prompt, decoded=decoded, count=reading.windows)
    check_measurable(adapter, config, windows)
    check_fit(loaded, given, config, prompt + decoded)
    return windows


def _warn_if_seen(made: Calibration, text: str) -> None:
    from infinigen_kv.calibration.fingerprint import text_hash

    if made.settings.get("texts_sha256") == text_hash([text]):
        say("the model was calibrated on this very text, which flatters it: choose another --text")


def _facts(
    found: Diagnosis, reading: TextOptions, loaded: LoadedModel, target: ModelOptions
) -> dict[str, Any]:
    """What was measured on, for people and for JSON."""
    return {
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": target.device,
        "text": HELD_BACK if reading.text is None else str(reading.text),
        "tokens": f"{found.windows} window{'s' if found.windows > 1 else ''} of "
        f"{found.prompt_tokens} + {found.decoded_tokens}",
    }


def _command(
    html: Path, reading: TextOptions, selection: SelectionOptions, target: ModelOptions
) -> str:
    """What was typed, in one order and without what has its default."""
    words = ["infinigen-kv", "diagnose", target.model, "--html", str(html)]
    for group, default in (
        (reading, TextOptions()),
        (selection, SelectionOptions()),
        (target, ModelOptions(model=target.model)),
    ):
        for name, value in vars(group).items():
            if value == getattr(default, name):
                continue
            option = "--" + name.replace("_", "-")
            words += [option] if value is True else [option, str(value)]
    return shlex.join(words)
