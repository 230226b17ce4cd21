"""Other settings for a run, under which it may need less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from infinigen_kv.errors import InputError
from infinigen_kv.memory.request import PlanRequest
from infinigen_kv.storage.home_kinds.registry import HOMES

Style = Literal["option", "setting"]
"""As the command line spells a setting, or as Python does."""

NUMBER_BITS = {"none": 16, "int8": 8, "int4": 4}
RESIDENT = (0.1, 0.05, 0.0)
CHUNKS = (1024, 256)
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Change:
    """Another value of the setting ``name``; ``apply`` gives a run with it."""

    name: str
    option: str
    setting: str
    apply: Callable[[PlanRequest], PlanRequest]

    def text(self, style: Style) -> str:
        """How the user says it."""
        return self.option if style == "option" else self.setting


def changes(request: PlanRequest) -> Iterator[Change]:
    """Changes of one setting, of each from the mildest value to the strongest."""
    yield from _storage_changes(request)
    for chunk in CHUNKS:
        if chunk < request.chunk:
            yield _prompt_chunk(chunk)
    if request.geometry.dtype.itemsize > DTYPE.itemsize:
        yield _dtype(DTYPE)


def rows(count: int) -> Change:
    """A batch of so many rows."""
    return Change("rows", f"--batch {count}", f"{count} rows", lambda run: replace(run, rows=count))


def context(tokens: int) -> Change:
    """A context of so many tokens."""
    words = f"a context of at most {tokens} tokens"
    return Change("context", words, words, lambda run: replace(run, context=tokens))


def _storage_changes(request: PlanRequest) -> Iterator[Change]:
    storage = request.storage
    for codec, bits in NUMBER_BITS.items():
        if bits < NUMBER_BITS[storage.codec]:
            yield from _stored(request, "codec", codec, codec)
    for home, kind in HOMES.items():
        frees = kind.place == "disk" or not request.unified
        if home != storage.home and kind.is_advised and frees:
            yield from _stored(request, "home", home, home)
    budget = storage.resident_budget_on(request.device)
    for share in RESIDENT:
        if budget and (not isinstance(budget, float) or share < budget):
            yield from _stored(request, "resident", share, f"{share:.0%}")
    if storage.resident_layers != ():
        yield from _stored(request, "resident_layers", (), "none")


def _stored(request: PlanRequest, name: str, value: Any, typed: str) -> Iterator[Change]:
    """A change of the storage, if its settings go together."""

    def apply(run: PlanRequest) -> PlanRequest:
        return replace(run, storage=replace(run.storage, **{name: value}))

    try:
        apply(request)
    except InputError:
        return
    yield Change(name, f"--{name.replace('_', '-')} {typed}", f"{name}={value!r}", apply)


def _prompt_chunk(tokens: int) -> Change:
    option, setting = f"--prompt-chunk {tokens}", f"prompt_chunk={tokens}"
    return Change("prompt_chunk", option, setting, lambda run: replace(run, prompt_chunk=tokens))


def _dtype(dtype: torch.dtype) -> Change:
    def apply(run: PlanRequest) -> PlanRequest:
        return replace(run, geometry=run.geometry.with_dtype(dtype))

    return Change("dtype", f"--dtype {str(dtype).removeprefix('torch.')}", f"dtype={dtype}", apply)
