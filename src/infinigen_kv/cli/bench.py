"""``infinigen-kv bench``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from infinigen_kv.cli.files import read_text
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
from infinigen_kv.cli.output import percent, print_json, table
from infinigen_kv.cli.storage_options import StorageOptions, storage_record
from infinigen_kv.errors import InputError
from infinigen_kv.progress import bar
from infinigen_kv.texts import documentation_text

if TYPE_CHECKING:
    from infinigen_kv.bench import BenchResult
    from infinigen_kv.peers import Peers

POLICIES = "ideal,stream,infinigen-paper,infinigen"
APART = 500  # tokens between the starts of the rows' texts


def bench(
    *,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", metavar="P", min=1, help="Length of the prompt.")
    ] = 4096,
    decode_tokens: Annotated[
        int, typer.Option("--decode-tokens", metavar="T", min=1, help="Measured steps.")
    ] = 64,
    batch: Annotated[int, typer.Option("--batch", metavar="B", min=1, help="Rows.")] = 1,
    policies: Annotated[
        str,
        typer.Option("--policies", metavar="LIST", help="What to compare, separated by commas."),
    ] = POLICIES,
    peers: Annotated[
        str,
        typer.Option(
            "--peers",
            metavar="LIST",
            help="Transformers' own caches to time in turns with them: DynamicCache, StaticCache, "
            "QuantizedCache. [default: none]",
            show_default=False,
        ),
    ] = "",
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="SHARE",
            help="Share of the cached tokens for the policies with a fixed budget, e.g. 20% or "
            "0.2, in (0, 1]. [default: 20%]",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text of the prompts. [default: the documentation of the Python language]",
            show_default=False,
        ),
    ] = None,
    prompt_chunk: PromptChunkOption = DEFAULT_CHUNK,
    device_memory: DeviceMemoryOption = None,
    json: JsonOption = False,
    storage: StorageOptions,
    selection: SelectionOptions,
    target: ModelOptions,
) -> None:
    """Time decode steps of several policies side by side, on the same tokens."""
    from infinigen_kv.peers import Peers, check_peer
    from infinigen_kv.policies.registry import check_policy

    beside = [check_peer(name.strip()) for name in peers.split(",") if name.strip()]
    names = [check_policy(name.strip()) for name in policies.split(",") if name.strip()]
    if not names:
        raise InputError(f"--policies {policies!r} names none: the default is {POLICIES}")
    share = parse_budget(budget)
    config, where = selection.config(), storage.config()
    memory = parse_memory("--device-memory", device_memory)
    chunk = parse_prompt_chunk(prompt_chunk)
    content = documentation_text() if text is None else read_text(text, option="--text")
    given = read_calibration(selection.calibration)
    loaded = load(target)
    import torch

    from infinigen_kv.bench import EXTRA_STEPS, IDEAL
    from infinigen_kv.bench import bench as run
    from infinigen_kv.session import attach

    ids = loaded.tokenizer(content, verbose=False)["input_ids"]
    needed = prompt_tokens + (batch - 1) * APART
    if needed > len(ids):
        raise InputError(
            f"--prompt-tokens {prompt_tokens} and --batch {batch} need {needed} tokens, but the "
            f"text has {len(ids)}"
        )
    check_fit(loaded, given, config, prompt_tokens + decode_tokens + EXTRA_STEPS)
    check_memory_fit(
        loaded,
        given,
        memory,
        context=prompt_tokens + decode_tokens + EXTRA_STEPS,
        new_tokens=decode_tokens + EXTRA_STEPS,
        rows=batch,
        prompt_chunk=chunk,
        config=config,
        storage=where,
        budget=share,
        policies=tuple(dict.fromkeys([IDEAL, *names])),
    )
    made = calibrated(loaded, given)
    config = selected_config(selection, made)
    where = selected_storage(where, config, made, loaded)
    starts = range(0, batch * APART, APART)
    prompt = torch.tensor([ids[start : start + prompt_tokens] for start in starts])
    prompt = prompt.to(loaded.model.device)
    tokens = prompt_tokens + decode_tokens + EXTRA_STEPS
    others = Peers(loaded.model, beside, tokens=tokens)
    others.read(prompt)
    with attach(loaded.model, made, config, where) as session:
        result = run(
            session,
            prompt,
            decode_tokens=decode_tokens,
            policies=names,
            prompt_chunk=chunk,
            budget=share,
            also=others.step,
            progress=bar,
        )
    if json:
        dtype = str(loaded.model.dtype).removeprefix("torch.")
        echo = {"model": target.model, "dtype": dtype, "prompt_chunk": chunk}
        settings = {"config": asdict(config), "storage": storage_record(where), "budget": share}
        found = [each.to_dict() for each in others.results()]
        also = {"peers": found, "peers_skipped": others.skipped} if beside else {}
        print_json({**echo, **settings, **result.to_dict(), **also})
    else:
        _print(result, others, target.model)


def parse_budget(text: str | None) -> float:
    """``20%`` or ``0.2`` to a share; errors name the option."""
    from infinigen_kv.policies.settings import BUDGET, PolicySettings
    from infinigen_kv.storage import parse_size

    if text is None:
        return BUDGET
    try:
        return PolicySettings(budget=parse_size("--budget", text, units=False)).budget
    except InputError as error:
        raise InputError(
            f"--budget {text!r} is not valid: it must be a share of the cached tokens in (0, 1], "
            "e.g. 20% or 0.2"
        ) from error


def _print(result: BenchResult, peers: Peers, model: str) -> None:
    link = result.link
    if result.link_is_emulated and result.link_rate is not None:
        link = f"{link} (EMULATED, {result.link_rate / 1e9:.3f} GB/s)"
    title = (
        f"{model}, {result.batch} x {result.prompt_tokens} prompt tokens, "
        f"{result.decode_tokens} steps, link {link}, {result.threads} threads"
    )
    columns = [
        "policy", "ms a step", "p90", "x ideal", "tokens/s", "link MB a step", "link wait ms",
        "fetched", "resident hits", "KL to ideal", "home MB", "device MB",
    ]  # fmt: skip
    rows = [
        [
            each.policy,
            f"{each.step_ms_median:.1f}",
            f"{each.step_ms_p90:.1f}",
            f"{each.ratio_to_ideal:.2f}",
            f"{each.tokens_per_s:.1f}",
            f"{each.link_bytes_per_step / 1e6:.2f}",
            f"{each.link_wait_ms_per_step:.2f}",
            percent(each.fetched_share),
            percent(each.resident_hit_rate),
            f"{each.kl_to_ideal:.4f}",
            f"{each.home_bytes / 1e6:.0f}",
            f"{each.device_kv_bytes / 1e6:.0f}",
        ]
        for each in result.policies
    ]
    base = result.policies[0].step_ms_median
    rows += [
        [
            peer.name,
            f"{peer.step_ms_median:.1f}",
            f"{peer.step_ms_p90:.1f}",
            f"{peer.step_ms_median / base:.2f}",
            f"{peer.tokens_per_s:.1f}",
            *(["-"] * 4),
            f"{peer.kl_to_ideal:.4f}",
            *(["-"] * 2),
        ]
        for peer in peers.results()
    ]
    table(title, columns, rows)
    for why in peers.skipped.values():
        typer.echo(f"left out: {why}")
    for each in result.policies:
        if each.resident_layers:
            kept = ", ".join(map(str, each.resident_layers))
            size = sum(each.resident_layers.values()) / 1e6
            typer.echo(f"{each.policy} keeps all KV of layer {kept} on the device: {size:.1f} MB")
