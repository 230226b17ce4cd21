"""``infinigen-kv plan``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinigen_kv.cli.loading import read_calibration
from infinigen_kv.cli.memory_options import DeviceMemoryOption, parse_memory
from infinigen_kv.cli.options import (
    DEFAULT_CHUNK,
    JsonOption,
    ModelOptions,
    PromptChunkOption,
    SelectionOptions,
    parse_dtype,
    parse_prompt_chunk,
)
from infinigen_kv.cli.output import print_json, table, waiting
from infinigen_kv.cli.storage_options import StorageOptions, storage_record
from infinigen_kv.errors import InputError

if TYPE_CHECKING:
    import torch

    from infinigen_kv.memory import Advice, Budget, MemoryPlan, ModelGeometry, PlanRequest

NEW_TOKENS = 128


def plan(
    *,
    context: Annotated[
        int,
        typer.Option(
            "--context",
            metavar="N",
            min=2,
            help="Tokens per row, prompt and new ones together.",
            show_default=False,
        ),
    ],
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            metavar="T",
            min=1,
            help=f"How many of them are new. [default: {NEW_TOKENS}, or all but one]",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="B", min=1, help="Rows.")] = 1,
    policy: Annotated[
        str,
        typer.Option("--policy", metavar="NAME", help="What the cache does, as for bench."),
    ] = "infinigen",
    prompt_chunk: PromptChunkOption = DEFAULT_CHUNK,
    device_memory: DeviceMemoryOption = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            "--host-memory",
            metavar="SIZE",
            help="With a CUDA device: memory of its machine. [default: what is available here]",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
    storage: StorageOptions,
    selection: SelectionOptions,
    target: ModelOptions,
) -> None:
    """Say what a run will need of memory, and which setting to change if it does not fit.

    Only the model's configuration is read. Not counted: the libraries themselves, and freed memory
    that the C library's heap keeps.
    """
    config, where, chunk = selection.config(), storage.config(), parse_prompt_chunk(prompt_chunk)
    device_bytes = parse_memory("--device-memory", device_memory)
    host_bytes = parse_memory("--host-memory", host_memory)
    given = read_calibration(selection.calibration)
    config = selection.config(given)
    device = _device(target.device)
    if max_new_tokens is not None and max_new_tokens >= context:
        raise InputError(
            f"--max-new-tokens {max_new_tokens} is not valid: it must be less than --context "
            f"{context}, which counts the prompt and the new tokens together"
        )
    geometry = _geometry(target, context)
    from infinigen_kv.memory import (
        Part,
        PlanRequest,
        advise,
        calibration_fields,
        machine_budget,
        plan_memory,
        shortfalls,
    )
    from infinigen_kv.session.attach import default_storage

    where = default_storage(given, config, device, where)

    request = PlanRequest(
        geometry=geometry,
        context=context,
        new_tokens=max_new_tokens or min(NEW_TOKENS, context - 1),
        rows=batch,
        prompt_chunk=chunk,
        config=config,
        storage=where,
        device=device,
        policies=(policy,),
        **calibration_fields(given),
    )
    budget = machine_budget(request, device_memory=device_bytes, host_memory=host_bytes)
    made = plan_memory(request)
    advice = advise(request, budget) if shortfalls(made, budget) else []
    if json:
        echo = {"model": target.model, "context": context, "batch": batch, "policy": policy}
        settings = {"config": asdict(config), "storage": storage_record(where)}
        print_json({**echo, **settings, **_record(request, made, budget, advice)})
    else:
        unknown = given is None and where.resident_layers == "auto" and made["home"] != Part("home")
        _print(target.model, request, made, budget, advice, uncalibrated=unknown)


def _geometry(target: ModelOptions, context: int) -> ModelGeometry:
    """The model's sizes, if it has positions enough."""
    dtype = parse_dtype(target.dtype)
    with waiting(f"reading the configuration of {target.model} ..."):
        from infinigen_kv.memory import read_geometry

        geometry = read_geometry(
            target.model, dtype=dtype, trust_remote_code=target.trust_remote_code
        )
    if geometry.max_positions is not None and context > geometry.max_positions:
        raise InputError(
            f"--context {context} is more than the model's {geometry.max_positions} positions"
        )
    return geometry


def _device(name: str) -> torch.device:
    """A device that need not be there."""
    import torch

    try:
        device = torch.device(name)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"--device {name!r}: not a device; give cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"--device {name!r}: not a device; give cpu, cuda or cuda:N")
    return device


def _record(
    request: PlanRequest, plan: MemoryPlan, budget: Budget, advice: list[Advice]
) -> dict[str, Any]:
    from infinigen_kv.memory import shortfalls
    from infinigen_kv.memory.plan import PLACES

    lacking = shortfalls(plan, budget)
    return {
        "dtype": str(request.geometry.dtype).removeprefix("torch."),
        "device": str(request.device),
        "parts": [asdict(part) for part in plan.parts],
        "total": {place: plan.total(place) for place in PLACES},
        "available": {place: budget.at(place) for place in PLACES},
        "fits": not lacking,
        "missing": {each.place: each.missing for each in lacking},
        "home_bytes": plan.caches[0].home_bytes,
        "device_kv_bytes": plan.caches[0].device_bytes,
        "fits_with": [
            {"change": each.text("option"), "total": each.plan.total("device")} for each in advice
        ],
    }


def _print(
    model: str,
    request: PlanRequest,
    plan: MemoryPlan,
    budget: Budget,
    advice: list[Advice],
    *,
    uncalibrated: bool,
) -> None:
    from infinigen_kv.memory import readable, refusal, shortfalls
    from infinigen_kv.memory.plan import PLACES
    from infinigen_kv.storage.home_kinds.base import Place

    places: list[Place] = ["device", "disk"] if request.unified else list(PLACES)
    names = {"device": "memory" if request.unified else "device", "host": "host", "disk": "disk"}

    def cell(nbytes: int | None) -> str:
        return readable(nbytes) if nbytes else "-"

    rows = []
    for part in plan.parts:
        shown = [part.at(place) for place in places]
        if request.unified:
            shown[0] += part.host
        if any(shown):
            word = f"{part.name} *" if part.phase != "always" else part.name
            rows.append([word, *map(cell, shown)])
    rows.append(["needed", *(cell(plan.total(place)) for place in places)])
    rows.append(["available", *(cell(budget.at(place)) for place in places)])
    dtype = str(request.geometry.dtype).removeprefix("torch.")
    title = (
        f"{model}, {dtype} on {request.device}: {request.rows} x {request.context} tokens, "
        f"{request.new_tokens} of them new"
    )
    table(title, ["", *(names[place] for place in places)], rows)
    typer.echo("* not at the same time: the largest one counts")
    if uncalibrated:
        typer.echo("no layer counts as hard to predict, since no --calibration is given")
    lacking = shortfalls(plan, budget)
    typer.echo(refusal(lacking, advice, "option") if lacking else "it fits")
