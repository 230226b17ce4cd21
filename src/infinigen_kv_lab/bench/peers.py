"""Transformers' own caches, timed in turns with ours: what a user would pick instead.

They run on a twin of the model that shares its weights and keeps Transformers' own attention.
"""

from __future__ import annotations

import copy
import difflib
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache

from infinigen_kv.cache.forward import forward, timed_forward
from infinigen_kv.errors import InputError
from infinigen_kv_lab.kit.divergence import kl_divergence, log_probabilities

QUANTISERS: Mapping[str, str] = MappingProxyType({"quanto": "optimum.quanto", "hqq": "hqq"})
"""Backends of `QuantizedCache`, in order of preference, with the module that each needs."""

_PACKAGES = "optimum-quanto or hqq"


@dataclass(frozen=True, slots=True)
class PeerResult:
    """Figures of one of Transformers' caches; the names are `bench.run.PolicyResult`'s."""

    name: str
    step_ms_median: float
    step_ms_p90: float
    tokens_per_s: float
    prompt_seconds: float
    kl_to_ideal: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(slots=True)
class _Run:
    cache: Any
    prompt_seconds: float = 0.0
    times: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)


def _dynamic(model: PreTrainedModel, tokens: int) -> Any:
    return DynamicCache(config=model.config)


def _static(model: PreTrainedModel, tokens: int) -> Any:
    return StaticCache(config=model.config, max_cache_len=tokens)


def _quantized(model: PreTrainedModel, tokens: int) -> Any:
    backend = next(name for name, module in QUANTISERS.items() if _has(module))
    return QuantizedCache(backend, model.config)


_MAKERS: Mapping[str, Callable[[PreTrainedModel, int], Any]] = MappingProxyType(
    {"DynamicCache": _dynamic, "StaticCache": _static, "QuantizedCache": _quantized}
)
PEERS: tuple[str, ...] = tuple(_MAKERS)
"""Names of the caches, those of their classes."""


def check_peer(name: str) -> str:
    """The class's name, also given in small letters; `InputError` says which names there are."""
    known = {peer.lower(): peer for peer in PEERS}
    if name.lower() in known:
        return known[name.lower()]
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    hint = f"did you mean {known[near[0]]}? " if near else ""
    raise InputError(f"peer {name!r} is not valid: {hint}it must be one of {', '.join(PEERS)}")


def missing_for(name: str, model: PreTrainedModel) -> str | None:
    """Why a peer cannot run here; None if it can."""
    if name != "QuantizedCache":
        return None
    if not any(_has(module) for module in QUANTISERS.values()):
        return f"QuantizedCache needs {_PACKAGES}, and neither is installed"
    kinds = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention"}
    return f"QuantizedCache knows full attention only, not {', '.join(kinds)}" if kinds else None


class Peers:
    """Some of Transformers' caches on one prompt; use `read`, then `step` in each decode step.

    Parameters
    ----------
    model
        Not attached; its twin shares the weights.
    names
        Of `PEERS`. Those that cannot run are left out; ``skipped`` says why.
    tokens
        Per row, that the caches are made for.

    Raises
    ------
    InputError
        If a name is unknown.
    """

    def __init__(self, model: PreTrainedModel, names: Sequence[str], *, tokens: int) -> None:
        chosen = [check_peer(name) for name in dict.fromkeys(names)]
        reasons = {name: missing_for(name, model) for name in chosen}
        self.skipped = {name: why for name, why in reasons.items() if why is not None}
        self._model = twin(model) if len(self.skipped) < len(chosen) else model
        self._runs = {
            name: _Run(_MAKERS[name](self._model, tokens))
            for name in chosen
            if name not in self.skipped
        }
        self._rows = 1

    @torch.no_grad()
    def read(self, prompt: Tensor) -> None:
        """Read the prompt ``(B, P)`` at once, as ``model.generate`` does."""
        self._rows = prompt.shape[0]
        for run in self._runs.values():
            started = time.perf_counter()
            forward(self._model, prompt, run.cache, last_only=True).cpu()  # waits for a GPU
            run.prompt_seconds = time.perf_counter() - started

    @torch.no_grad()
    def step(self, token: Tensor, reference: Tensor, measured: bool) -> None:
        """One decode step of every cache.

        Parameters
        ----------
        token
            ``(B, 1)``, what all systems are fed.
        reference
            ``(B, V)`` log-probabilities of ``ideal``.
        measured
            False while warming up.
        """
        for run in self._runs.values():
            logits, elapsed = timed_forward(self._model, token, run.cache)
            if measured:
                run.times.append(elapsed)
                scores = log_probabilities(logits[:, -1])
                run.kl.append(kl_divergence(reference, scores).mean().item())

    def results(self) -> list[PeerResult]:
        """Of the measured steps so far, of which there must be one."""
        return [
            PeerResult(
                name=name,
                step_ms_median=(median := statistics.median(run.times)),
                step_ms_p90=sorted(run.times)[min(len(run.times) - 1, int(0.9 * len(run.times)))],
                tokens_per_s=self._rows * 1e3 / median,
                prompt_seconds=run.prompt_seconds,
                kl_to_ideal=statistics.fmean(run.kl),
            )
            for name, run in self._runs.items()
        ]


def twin(model: PreTrainedModel, *, layers: int | None = None) -> PreTrainedModel:
    """A second model over the same weights, with a configuration of its own.

    Parameters
    ----------
    model
        Not attached.
    layers
        Keep the first so many layers only; None for all.

    Raises
    ------
    InputError
        If the model does not have so many layers.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    made: Any = copy.deepcopy(model, shared)
    if layers is not None:
        _cut(made, layers)
    result: PreTrainedModel = made
    return result


def _cut(model: Any, layers: int) -> None:
    count = int(model.config.num_hidden_layers)
    if not 0 < layers <= count:
        raise InputError(f"layers={layers} is not valid: it must be in 1 to {count}")
    decoder = model.get_decoder()
    decoder.layers = decoder.layers[:layers]
    kinds = getattr(model.config, "layer_types", None)
    model.config.num_hidden_layers = layers
    if kinds is not None:
        model.config.layer_types = kinds[:layers]


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
