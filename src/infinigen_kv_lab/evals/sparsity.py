"""How many tokens the attention needs: by layer, by context length, and over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinigen_kv.errors import InputError
from infinigen_kv.models.adapters.layer_spec import LayerSpec
from infinigen_kv.models.soundness import read_window
from infinigen_kv_lab.evals.attention import attention_weights
from infinigen_kv_lab.evals.observing import ByLayer, ModelTask, by_layer, read_ids
from infinigen_kv_lab.evals.probe import seeing_attention
from infinigen_kv_lab.evals.reading import Reader
from infinigen_kv_lab.evals.task import Inputs, Result, Sample
from infinigen_kv_lab.kit.intervals import Estimate

MASS = 0.9  # of a query's attention
FEW = 0.01  # of the tokens before a query: what "attends to few" means (Figure 20)
QUERIES = 16  # the last ones of a context, of which tokens are counted
PLACES = 48  # pieces of a window's second half, over each of which single keys' weights are means
SINKS = 4  # first tokens: they get attention whatever they are, and so are not looked at
TRACKED_DEPTH = 2 / 3  # of the layers: where the single keys are looked at


@dataclass(frozen=True, slots=True)
class AtLength:
    """One context length.

    ``needed`` is the mean number of tokens that make up `MASS` of a query's attention, and
    ``needed_share`` the same as a share of the tokens that the query sees, ``few`` the share of
    queries for which that is below `FEW`, each by layer. ``histogram[layer][i]`` is the share of
    the layer's queries (of all heads) that need fewer than ``2 ** (i + 1)`` and at least ``2 ** i``
    tokens.
    """

    length: int
    needed: ByLayer
    needed_share: ByLayer
    few: ByLayer
    histogram: list[list[float]]


@dataclass(frozen=True, slots=True)
class Track:
    """The attention that one key gets from the later queries of one head, in the first window.

    ``course``: of the keys after the first `SINKS`, ``key`` is the one whose weight is the largest,
    or has risen or fallen most from the first to the last quarter. ``weights`` are means over the
    queries from each of the ``positions`` to the next.
    """

    course: str
    layer: int
    head: int
    key: int
    positions: list[int]
    weights: list[float]


@dataclass(frozen=True, slots=True)
class Sparsity(Result):
    """Tokens needed for `MASS` of the attention (paper, Figures 5 and 20); intervals over windows.

    ``few`` is the mean over layers at the longest context.
    """

    windows: int
    layers: tuple[int, ...]
    lengths: tuple[AtLength, ...]
    few: Estimate
    tracks: tuple[Track, ...]

    def headline(self) -> dict[str, str]:
        last = self.lengths[-1]
        return {
            "context": str(last.length),
            f"tokens for {MASS}": str(last.needed.mean),
            f"queries under {FEW:.0%}".replace("%", " %"): str(last.few.mean),
        }


class SparsityTask(ModelTask):
    """Windows as long as the longest context, each read once with full attention."""

    def __init__(self, name: str, ids: Tensor, *, lengths: Sequence[int], source: str) -> None:
        self._lengths = sorted(set(lengths))
        super().__init__(name, ids, window=self._lengths[-1], source=source)

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, "lengths": self._lengths, "mass": MASS, "queries": QUERIES}

    @torch.no_grad()
    def measure(self, reader: Reader, index: int, shared: Any) -> Sample:
        session = reader.session
        full = [spec.index for spec in session.adapter.layers if not spec.is_sliding]
        tracked = full[min(len(full) - 1, round(TRACKED_DEPTH * len(full)))] if not index else None
        sample: Sample = {"layers": full, "lengths": {str(each): [] for each in self._lengths}}

        def see(layer: int, query: Tensor, keys: Tensor) -> None:
            spec = session.adapter.layers[layer]
            if spec.is_sliding:
                return
            for length in self._lengths:
                last = query[:, :, length - QUERIES : length]
                weights = attention_weights(spec, last, keys[:, :, :length])
                sample["lengths"][str(length)].append(count_needed(weights[0].flatten(0, 1)))
            if layer == tracked:
                sample["tracks"] = track(layer, *second_half(spec, query, keys))

        window = self._windows[index].to(session.model.device)
        with seeing_attention(session.model, see):
            read_window(session.adapter, window)
        return {**sample, "fetched": None, "fetched_all_layers": None}

    def summarise(
        self, samples: Sequence[Sample], full: Sequence[Sample] | None = None
    ) -> Sparsity:
        lengths = tuple(_at_length(samples, length) for length in self._lengths)
        return Sparsity(
            windows=len(samples),
            layers=tuple(samples[0]["layers"]),
            lengths=lengths,
            few=lengths[-1].few.mean,
            tracks=tuple(Track(**each) for each in samples[0].get("tracks", ())),
        )


def sparsity(name: str, inputs: Inputs) -> SparsityTask:
    """Windows of the user's text, or of WikiText-2.

    Raises
    ------
    InputError
        If a length exceeds the model's positions.
    """
    lengths, limit = inputs.options.lengths, inputs.max_positions
    if limit is not None and max(lengths) > limit:
        raise InputError(
            f"a context of {max(lengths)} tokens is longer than the model's {limit} positions: "
            "choose shorter lengths"
        )
    ids, source = read_ids(name, inputs)
    return SparsityTask(name, ids, lengths=lengths, source=source)


def count_needed(weights: Tensor) -> dict[str, Any]:
    """How many tokens make up `MASS`, of queries that are the last of S tokens.

    Parameters
    ----------
    weights
        ``(H, Q, S)`` causal attention weights.

    Returns
    -------
    dict
        Means over heads and queries under the names of `AtLength`.
    """
    needed = tokens_needed(weights).double()  # (H, Q)
    queries, tokens = weights.shape[1:]
    seen = torch.arange(tokens - queries + 1, tokens + 1, device=weights.device)
    bins = needed.log2().floor().long().flatten()
    counts = torch.bincount(bins, minlength=int(tokens).bit_length())
    return {
        "needed": needed.mean().item(),
        "needed_share": (needed / seen).mean().item(),
        "few": (needed < FEW * seen).double().mean().item(),
        "histogram": (counts / len(bins)).tolist(),
    }


def tokens_needed(weights: Tensor) -> Tensor:
    """Fewest tokens whose weights ``(..., S)`` add up to at least `MASS`: ``(...)`` int64."""
    running = weights.sort(dim=-1, descending=True).values.double().cumsum(dim=-1)
    return (running < MASS).sum(dim=-1) + 1


def second_half(spec: LayerSpec, query: Tensor, keys: Tensor) -> tuple[list[int], Tensor]:
    """What the queries of a window's second half give the keys of its first.

    ``query`` is ``(1, H, N, D)``, ``keys`` ``(1, H_kv, N, D)``. Returns where up to `PLACES` pieces
    start, and the mean weights over each, ``(pieces, H, N / 2)``.
    """
    half, tokens = keys.shape[2] // 2, keys.shape[2]
    starts = sorted({half + at * (tokens - half) // PLACES for at in range(PLACES)})
    means = []
    for start, end in pairwise([*starts, tokens]):
        weights = attention_weights(spec, query[:, :, start:end], keys[:, :, :end])
        means.append(weights[0, ..., :half].double().mean(dim=2).flatten(0, 1))
    return starts, torch.stack(means)


def track(layer: int, positions: list[int], weights: Tensor) -> list[dict[str, Any]]:
    """Three keys and their weights as `Track` has them; ``weights`` are ``(pieces, H, keys)``."""
    quarter = max(1, len(positions) // 4)
    others = weights[:, :, SINKS:]
    rise = others[-quarter:].mean(dim=0) - others[:quarter].mean(dim=0)  # (H, keys)
    found = []
    for course, worth in (("largest", others.mean(dim=0)), ("rising", rise), ("falling", -rise)):
        head, key = divmod(int(worth.argmax()), others.shape[2])
        key += SINKS
        found.append(
            {
                "course": course,
                "layer": layer,
                "head": head,
                "key": key,
                "positions": positions,
                "weights": weights[:, head, key].tolist(),
            }
        )
    return found


def _at_length(samples: Sequence[Sample], length: int) -> AtLength:
    tables = [each["lengths"][str(length)] for each in samples]  # windows, layers
    columns = [
        {name: [layer[name] for layer in table] for name in ("needed", "needed_share", "few")}
        for table in tables
    ]
    histogram = np.mean([[layer["histogram"] for layer in table] for table in tables], axis=0)
    return AtLength(
        length=length,
        needed=by_layer(columns, "needed"),
        needed_share=by_layer(columns, "needed_share"),
        few=by_layer(columns, "few"),
        histogram=histogram.tolist(),
    )
