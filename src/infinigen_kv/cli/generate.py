"""``infinigen-kv generate``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinigen_kv.cli.files import STDIN, check_text, read_text
from infinigen_kv.cli.loading import (
    calibrated,
    check_fit,
    check_memory_fit,
    load,
    read_calibration,
    selected_config,
    selected_storage,
)
from infinigen_kv.cli.memory_options import DeviceMemoryOption, parse_memory
from infinigen_kv.cli.options import (
    DEFAULT_CHUNK,
    JsonOption,
    ModelOptions,
    PromptChunkOption,
    SelectionOptions,
    parse_prompt_chunk,
)
from infinigen_kv.cli.output import percent, print_json, say
from infinigen_kv.cli.storage_options import StorageOptions, link_note, storage_record
from infinigen_kv.errors import InputError

if TYPE_CHECKING:
    from infinigen_kv.session.language_model import Generation


def generate(
    *,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", metavar="TEXT", help="The prompt.", show_default=False),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            "--prompt-file",
            metavar="FILE",
            help=f"A UTF-8 file that holds the prompt; {STDIN} is stdin.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Tokens to generate.")
    ] = 128,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Attend to the whole cache; needs no calibration.")
    ] = False,
    prompt_chunk: PromptChunkOption = DEFAULT_CHUNK,
    device_memory: DeviceMemoryOption = None,
    json: JsonOption = False,
    storage: StorageOptions,
    selection: SelectionOptions,
    target: ModelOptions,
) -> None:
    """Continue a prompt, greedily, and print the text as it comes."""
    text = _prompt(prompt, prompt_file)
    if full and selection.given():
        raise InputError(
            f"--full attends to the whole cache: leave out {', '.join(selection.given())}"
        )
    config, where = selection.config(), storage.config()
    memory = parse_memory("--device-memory", device_memory)
    chunk = parse_prompt_chunk(prompt_chunk)
    given = read_calibration(selection.calibration)
    loaded = load(target)
    from transformers import TextStreamer

    from infinigen_kv.session.language_model import LanguageModel

    tokens = LanguageModel(loaded, None, config).encode(text, chat=chat).shape[1]
    check_fit(loaded, given, config, tokens + max_new_tokens)
    check_memory_fit(
        loaded,
        given,
        memory,
        context=tokens + max_new_tokens,
        new_tokens=max_new_tokens,
        prompt_chunk=chunk,
        config=config,
        storage=where,
        policies=("stream" if full else "infinigen",),
    )
    made = None if full else calibrated(loaded, given)
    if made is not None:
        config = selected_config(selection, made)
        where = selected_storage(where, config, made, loaded)
    generation = LanguageModel(loaded, made, config, where).generate(
        text,
        max_new_tokens=max_new_tokens,
        chat=chat,
        full=full,
        prompt_chunk=chunk,
        device_memory=memory,
        streamer=TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    say(_summary(generation, full=full) + link_note(where))
    if json:
        print_json(
            {
                "model": target.model,
                "config": None if full else asdict(config),
                "storage": storage_record(where),
                "prompt_chunk": chunk,
                "text": generation.text,
                "prompt_tokens": generation.prompt_tokens,
                "new_tokens": len(generation.token_ids),
                "fetched_share": 1.0 if full else generation.fetched_share,
                "seconds": generation.seconds,
            }
        )


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise InputError("give the prompt with either --prompt or --prompt-file")
    if prompt_file is not None:
        return read_text(prompt_file, option="--prompt-file")
    assert prompt is not None
    return check_text(prompt, option="--prompt")


def _summary(generation: Generation, *, full: bool) -> str:
    share = generation.fetched_share
    if full:
        fetched = "full cache"
    elif share != share:  # NaN: too short a context for any selection
        fetched = "context too short to select from: attended to everything"
    else:
        fetched = f"fetched {percent(share)} of the cache"
    return (
        f"{generation.prompt_tokens} prompt tokens, {len(generation.token_ids)} new ones, "
        f"{fetched}, {generation.seconds:.1f} s"
    )
