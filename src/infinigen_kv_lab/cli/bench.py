"""``infinigen-kv bench``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from infinigen_kv.calibration.texts import documentation_text
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
from infinigen_kv.cli.sizes import parse_budget
from infinigen_kv.cli.storage_options import StorageOptions, storage_record
from infinigen_kv.errors import InputError
from infinigen_kv.progress import bar

if TYPE_CHECKING:
    from infinigen_kv_lab.bench.peers import Peers
    from infinigen_kv_lab.bench.run import BenchResult

POLICIES = "ideal,stream,infinigen-paper,infinigen"
APART = 500  # tokens between the starts of the rows' texts


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is timed, on which prompt."""

    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", metavar="P", min=1, help="Length of the prompt.")
    ] = 4096
    decode_tokens: Annotated[
        int, typer.Option("--decode-tokens", metavar="T", min=1, help="Measured steps.")
    ] = 64
    batch: Annotated[int, typer.Option("--batch", metavar="B", min=1, help="Rows.")] = 1
    policies: Annotated[
        str,
        typer.Option("--policies", metavar="LIST", help="What to compare, separated by commas."),
    ] = POLICIES
    peers: Annotated[
        str,
        typer.Option(
            "--peers",
            metavar="LIST",
            help="Transformers' own caches to time in turns with them: DynamicCache, StaticCache, "
            "QuantizedCache. [default: none]",
            show_default=False,
        ),
    ] = ""
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="SHARE",
            help="Share of the cached tokens for the policies with a fixed budget, e.g. 20% or "
            "0.2, in (0, 1]. [default: 20%]",
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
    prompt_chunk: PromptChunkOption = DEFAULT_CHUNK
    device_memory: DeviceMemoryOption = None

    def peer_names(self) -> list[str]:
        """Transformers' caches by name, each checked."""
        from infinigen_kv_lab.bench.peers import check_peer

        return [check_peer(name.strip()) for name in self.peers.split(",") if name.strip()]

    def policy_names(self) -> list[str]:
        """Policies by name, each checked; there must be one."""
        from infinigen_kv.policies.registry import check_policy

        names = [check_policy(name.strip()) for name in self.policies.split(",") if name.strip()]
        if not names:
            raise InputError(f"--policies {self.policies!r} names none: the default is {POLICIES}")
        return names

    def content(self) -> str:
        """The text that prompts are cut from."""
        if self.text is None:
            return documentation_text()
        return read_text(self.text, option="--text")

    def prompts(self, ids: list[int]) -> list[list[int]]:
        """Tokens of each row's prompt, cut from those of the text; errors say what is too long."""
        needed = self.prompt_tokens + (self.batch - 1) * APART
        if needed > len(ids):
            raise InputError(
                f"--prompt-tokens {self.prompt_tokens} and --batch {self.batch} need {needed} "
                f"tokens, but the text has {len(ids)}"
            )
        starts = range(0, self.batch * APART, APART)
        return [ids[start : start + self.prompt_tokens] for start in starts]


def bench(
    *,
    timed: BenchOptions,
    json: JsonOption = False,
    storage: StorageOptions,
    selection: SelectionOptions,
    target: ModelOptions,
) -> None:
    """Time decode steps of several policies side by side, on the same tokens."""
    from infinigen_kv_lab.bench.peers import Peers

    beside, names = timed.peer_names(), timed.policy_names()
    share = parse_budget(timed.budget)
    config, where = selection.config(), storage.config()
    memory = parse_memory("--device-memory", timed.device_memory)
    chunk = parse_prompt_chunk(timed.prompt_chunk)
    content = timed.content()
    given = read_calibration(selection.calibration)
    loaded = load(target)
    import torch

    from infinigen_kv.session.attach import attach
    from infinigen_kv_lab.bench.run import EXTRA_STEPS, IDEAL
    from infinigen_kv_lab.bench.run import bench as run

    prompts = timed.prompts(loaded.tokenizer(content, verbose=False)["input_ids"])
    steps = timed.decode_tokens + EXTRA_STEPS
    check_fit(loaded, given, config, timed.prompt_tokens + steps)
    check_memory_fit(
        loaded,
        given,
        memory,
        context=timed.prompt_tokens + steps,
        new_tokens=steps,
        rows=timed.batch,
        prompt_chunk=chunk,
        config=config,
        storage=where,
        budget=share,
        policies=tuple(dict.fromkeys([IDEAL, *names])),
    )
    made = calibrated(loaded, given)
    config = selected_config(selection, made)
    where = selected_storage(where, config, made, loaded)
    prompt = torch.tensor(prompts, device=loaded.model.device)
    others = Peers(loaded.model, beside, tokens=timed.prompt_tokens + steps)
    others.read(prompt)
    with attach(loaded.model, made, config, where) as session:
        result = run(
            session,
            prompt,
            decode_tokens=timed.decode_tokens,
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
