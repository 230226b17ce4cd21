"""How much a layer's input resembles what the layer before it had: why rehearsing works at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinigen_kv.errors import InputError
from infinigen_kv.models.adapters.base import Adapter
from infinigen_kv.models.soundness import read_window
from infinigen_kv_lab.evals.observing import ByLayer, ModelTask, by_layer, read_ids
from infinigen_kv_lab.evals.reading import Reader
from infinigen_kv_lab.evals.task import Inputs, Result, Sample
from infinigen_kv_lab.evals.windows import split_window

BLOCK_INPUT, NORMED, ATTENTION, FEED_FORWARD = TENSORS = (
    "block_input",
    "attention_input",
    "attention_output",
    "feed_forward_output",
)
FEED_FORWARD_NAMES = ("mlp", "fc2")  # the module whose output is the feed-forward's, by family

SeeTensor = Callable[[int, str, Tensor], None]
"""``(layer, one of TENSORS, (N, M))``, in the order in which the model makes them."""


@dataclass(frozen=True, slots=True)
class Similarity(Result):
    """Cosine similarities between consecutive layers, means over tokens.

    The input of layer i against the input (``block_input``), the attention's output and the
    feed-forward's output of layer i - 1 (paper, Table 1); ``attention_input`` compares what the
    attention of both reads, after the norm, which is what the rehearsal takes from the layer
    before. Values by layer are for ``layers``; intervals over windows.
    """

    windows: int
    window: int
    layers: tuple[int, ...]
    block_input: ByLayer
    attention_input: ByLayer
    attention_output: ByLayer
    feed_forward_output: ByLayer

    def headline(self) -> dict[str, str]:
        return {name.replace("_", " "): str(getattr(self, name).mean) for name in TENSORS}


class SimilarityTask(ModelTask):
    """Windows of a text, each read once with full attention."""

    @torch.no_grad()
    def measure(self, reader: Reader, index: int, shared: Any) -> Sample:
        adapter = reader.session.adapter
        before: dict[str, Tensor] = {}
        made: dict[str, Tensor] = {}
        found: dict[str, list[float]] = {name: [] for name in TENSORS}

        def see(layer: int, name: str, tensor: Tensor) -> None:
            if name == BLOCK_INPUT:
                before.clear()
                before.update(made)
                made.clear()
                for other in (BLOCK_INPUT, ATTENTION, FEED_FORWARD) if layer else ():
                    found[other].append(cosine(tensor, before[other]))
            elif name == NORMED and layer:
                found[NORMED].append(cosine(tensor, before[NORMED]))
            made[name] = tensor

        window = self._windows[index].to(reader.session.model.device)
        with watching_blocks(adapter, see):
            read_window(adapter, window)
        return {**found, "fetched": None, "fetched_all_layers": None}

    def summarise(
        self, samples: Sequence[Sample], full: Sequence[Sample] | None = None
    ) -> Similarity:
        return Similarity(
            windows=len(samples),
            window=self._windows.shape[1],
            layers=tuple(range(1, 1 + len(samples[0][BLOCK_INPUT]))),
            **{name: by_layer(samples, name) for name in TENSORS},
        )


def similarity(name: str, inputs: Inputs) -> SimilarityTask:
    """Windows of the user's text, or of WikiText-2."""
    ids, source = read_ids(name, inputs)
    window, _ = split_window(inputs)
    return SimilarityTask(name, ids, window=window, source=source)


def cosine(first: Tensor, second: Tensor) -> float:
    """Mean over tokens of the cosine similarity of ``(N, M)`` and ``(N, M)``."""
    return F.cosine_similarity(first.double(), second.double(), dim=-1).mean().item()


@contextmanager
def watching_blocks(adapter: Adapter, see: SeeTensor) -> Iterator[None]:
    """Inside the block ``see`` is called with the `TENSORS` of every layer, row 0 of the batch.

    Raises
    ------
    InputError
        If it is not known where the family's feed-forward ends.
    """
    blocks: Any = adapter.decoder.layers
    with ExitStack() as undo:
        # code that was compiled before may pass over hooks that are new
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        for spec in adapter.layers:
            block = blocks[spec.index]
            for module, name, is_input in (
                (block, BLOCK_INPUT, True),
                (spec.module, NORMED, True),
                (spec.module, ATTENTION, False),
                (_feed_forward(adapter, block), FEED_FORWARD, False),
            ):
                hook = _hook(adapter, spec.index, name, see)
                register = (
                    module.register_forward_pre_hook if is_input else module.register_forward_hook
                )
                undo.callback(register(hook, with_kwargs=True).remove)
        yield


def _hook(adapter: Adapter, layer: int, name: str, see: SeeTensor) -> Callable[..., None]:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:
        tensor = output[0] if output else adapter.attention_input(args, kwargs)
        tensor = tensor[0] if isinstance(tensor, tuple) else tensor
        see(layer, name, tensor.reshape(-1, tensor.shape[-1]))

    return hook


def _feed_forward(adapter: Adapter, block: nn.Module) -> nn.Module:
    for name in FEED_FORWARD_NAMES:
        module = getattr(block, name, None)
        if isinstance(module, nn.Module):
            return module
    raise InputError(
        f"the feed-forward of {adapter.family} models cannot be found: a decoder layer has none of "
        f"{', '.join(FEED_FORWARD_NAMES)}"
    )
