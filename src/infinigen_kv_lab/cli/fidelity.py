"""``infinigen-kv fidelity``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from infinigen_kv.calibration.texts import documentation_text
from infinigen_kv.cli.files import read_text
from infinigen_kv.cli.loading import calibrated, check_fit, load, read_calibration, selected_config
from infinigen_kv.cli.options import (
    DEFAULT_CHUNK,
    JsonOption,
    ModelOptions,
    PromptChunkOption,
    SelectionOptions,
    parse_prompt_chunk,
)
from infinigen_kv.cli.output import percent, print_json, table
from infinigen_kv.errors import InputError
from infinigen_kv.progress import bar

if TYPE_CHECKING:
    from infinigen_kv_lab.bench.fidelity import Fidelity

DOCS = "docs"


def fidelity(
    *,
    text: Annotated[
        str,
        typer.Option(
            "--text",
            metavar=f"FILE|{DOCS}",
            help=f"A UTF-8 text file, or the word {DOCS}: the documentation of the Python language "
            f"that every Python carries (a file of that name is ./{DOCS}).",
            show_default=False,
        ),
    ],
    prompt_tokens: Annotated[
        int,
        typer.Option(
            "--prompt-tokens",
            metavar="P",
            min=1,
            help="Tokens read with full attention.",
            show_default=False,
        ),
    ],
    decode_tokens: Annotated[
        int,
        typer.Option(
            "--decode-tokens",
            metavar="T",
            min=1,
            help="Tokens after them, read with selection and with full attention.",
            show_default=False,
        ),
    ],
    skip_tokens: Annotated[
        int,
        typer.Option("--skip-tokens", metavar="S", min=0, help="Tokens of the text to leave out."),
    ] = 0,
    prompt_chunk: PromptChunkOption = DEFAULT_CHUNK,
    json: JsonOption = False,
    selection: SelectionOptions,
    target: ModelOptions,
) -> None:
    """Measure on a text how close selected attention stays to full attention."""
    config, chunk = selection.config(), parse_prompt_chunk(prompt_chunk)
    content = documentation_text() if text == DOCS else read_text(text, option="--text")
    given = read_calibration(selection.calibration)
    loaded = load(target)
    import torch

    from infinigen_kv_lab.bench.fidelity import measure_fidelity

    ids = loaded.tokenizer(content, verbose=False)["input_ids"]
    wanted = skip_tokens + prompt_tokens + decode_tokens
    if wanted > len(ids):
        raise InputError(
            f"--skip-tokens {skip_tokens}, --prompt-tokens {prompt_tokens} and --decode-tokens "
            f"{decode_tokens} make {wanted} tokens, but the text has {len(ids)}"
        )
    check_fit(loaded, given, config, prompt_tokens + decode_tokens)
    made = calibrated(loaded, given)
    config = selected_config(selection, made)
    measured = measure_fidelity(
        loaded.model,
        made,
        config,
        torch.tensor(ids[skip_tokens:wanted]),
        prompt_tokens=prompt_tokens,
        prompt_chunk=chunk,
        progress=bar,
    )
    echo = {
        "model": target.model,
        "config": asdict(config),
        "text": text,
        "skip_tokens": skip_tokens,
        "prompt_chunk": chunk,
    }
    if json:
        print_json({**echo, **measured.to_dict()})
    else:
        _print(measured, f"{target.model}, {config.rehearsal} rehearsal, {text}")


def _print(measured: Fidelity, title: str) -> None:
    rows = [
        ["prompt and decoded tokens", f"{measured.prompt_tokens} + {measured.decode_tokens}"],
        ["fetched share, speculated layers", percent(measured.fetched_share, 2)],
        ["fetched share, all layers", percent(measured.fetched_share_all_layers, 2)],
        ["KL(full || selected), mean (nats)", f"{measured.kl_mean:.4f}"],
        ["KL(full || selected), 99th percentile", f"{measured.kl_p99:.4f}"],
        ["same most likely token", percent(measured.top1_same)],
        ["perplexity, full attention", f"{measured.ppl_full:.3f}"],
        ["perplexity, selected attention", f"{measured.ppl:.3f}"],
        ["recall of the tokens that matter", percent(measured.recall_mean)],
        ["attention mass on the selected", percent(measured.coverage_mean)],
        ["seconds", f"{measured.seconds:.1f}"],
    ]
    table(title, ["measure", "value"], rows)
