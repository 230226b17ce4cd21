"""``infinigen-kv demo``."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinigen_kv.cli.files import ensure_folder, write_text
from infinigen_kv.cli.loading import calibrated, load
from infinigen_kv.cli.options import (
    DEFAULT_CHUNK,
    DTYPES,
    JsonOption,
    ModelOptions,
    PromptChunkOption,
    parse_dtype,
    parse_prompt_chunk,
)
from infinigen_kv.cli.output import json_text, percent, print_json, say, table
from infinigen_kv.cli.storage_options import StorageOptions, link_note, storage_record
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.progress import bar

if TYPE_CHECKING:
    from infinigen_kv_lab.bench.comparison import Comparison

MODEL = "smollm2"
DTYPE = "bfloat16"
NEW_TOKENS = 64
OUTPUT = Path("infinigen-kv-demo")
PICTURE, RECORD = "demo.png", "demo.json"


def demo(
    *,
    output: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Folder for the picture and the JSON.")
    ] = OUTPUT,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="|".join(DTYPES), help="Type of the weights.")
    ] = DTYPE,
    prompt_chunk: PromptChunkOption = DEFAULT_CHUNK,
    json: JsonOption = False,
    storage: StorageOptions,
) -> None:
    """Answer a question about 6,000 tokens of documentation with SmolLM2: with the full cache, and
    with the paper's and the calibrated selection of it.
    """
    options = ModelOptions(model=MODEL, dtype=dtype)
    parse_dtype(dtype)
    where, chunk = storage.config(), parse_prompt_chunk(prompt_chunk)
    ensure_folder(output, option="--output")
    started = time.perf_counter()
    loaded = load(options)
    import torch

    from infinigen_kv_lab.bench.comparison import compare
    from infinigen_kv_lab.bench.demonstration import QUESTION, demo_prompt
    from infinigen_kv_lab.figures.drawing import require_matplotlib
    from infinigen_kv_lab.figures.layer_picture import plot_layers

    require_matplotlib()
    calibration = calibrated(loaded, None)
    prompt = torch.tensor([demo_prompt(loaded.tokenizer)])
    configs = {name: InfiniGenConfig(rehearsal=name) for name in ("paper", "calibrated")}
    say(f"reading {prompt.shape[1]} tokens of documentation three times ...")
    result = compare(
        loaded.model,
        loaded.tokenizer,
        calibration,
        configs,
        prompt,
        new_tokens=NEW_TOKENS,
        prompt_chunk=chunk,
        storage=where,
        progress=bar,
    )
    record = {
        "model": MODEL,
        "dtype": dtype,
        "question": QUESTION,
        "storage": storage_record(where),
        "prompt_chunk": chunk,
        "configs": {name: asdict(config) for name, config in configs.items()},
        **result.to_dict(),
        "picture": str(output / PICTURE),
        "seconds": time.perf_counter() - started,
    }
    title = f"SmolLM2-135M, {result.prompt_tokens} prompt tokens, {result.new_tokens} new ones"
    if storage.given():
        title += f", home {where.home}, codec {where.codec}{link_note(where)}"
    plot_layers(result, output / PICTURE, title=title)
    write_text(output / RECORD, json_text(record, indent=1) + "\n")
    _print(result, QUESTION, title)
    typer.echo(f"wrote {output / PICTURE} and {output / RECORD}")
    if json:
        print_json(record)


def _print(result: Comparison, question: str, title: str) -> None:
    rows = [
        [
            system.name,
            percent(system.fetched_share),
            percent(system.fetched_share_all_layers),
            f"{system.same_prefix} of {result.new_tokens}",
            f"{system.same_tokens} of {result.new_tokens}",
            f"{system.kl_mean:.4f}",
            f"{system.ms_per_token:.1f}",
        ]
        for system in result.systems
    ]
    columns = [
        "cache",
        "fetched",
        "all layers",
        "equal until",
        "equal tokens",
        "KL (nats)",
        "ms per token",
    ]
    table(title, columns, rows)
    typer.echo(f"Question: {question}\n")
    for system in result.systems:
        typer.echo(f"[{system.name}]\n{system.text.strip()}\n")
