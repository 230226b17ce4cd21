"""How much the attention over what a policy keeps resembles that over the full cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinigen_kv.attention.dense import causal_mask, grouped_scores
from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import InputError
from infinigen_kv.models.adapters.layer_spec import LayerSpec
from infinigen_kv.models.soundness import read_window
from infinigen_kv.policies.registry import cache_plan
from infinigen_kv.rehearsal.select import selection_mask
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv_lab.evals.observing import ByLayer, WindowTask, by_layer, read_ids
from infinigen_kv_lab.evals.probe import seeing_attention
from infinigen_kv_lab.evals.reading import Reader
from infinigen_kv_lab.evals.task import Inputs, Result, Sample, fetched, fetched_of, percent
from infinigen_kv_lab.evals.windows import split_window
from infinigen_kv_lab.kit.intervals import Estimate, share

STEPS = 16  # decode steps that one value of the course is a mean over
QUERY_BLOCK = 128  # queries whose weights are made at once
FIRST_LAYER = 1  # layer 0 has no predecessor, so not every policy selects there


@dataclass(frozen=True, slots=True)
class Kept(Result):
    """Cosine similarity of attention weights with those of the full cache (paper, Figure 4).

    The weights are the full cache's; the policy's are the same restricted to the tokens that it
    kept when it read the same text, and normalised again. ``course`` are means over `STEPS` decode
    steps each, ``similarity`` is by layer, ``mass`` the attention mass on what was kept. Layer 0
    is left out. Intervals over windows.
    """

    windows: int
    window: int
    prompt_tokens: int
    layers: tuple[int, ...]
    similarity: ByLayer
    mass: ByLayer
    course: tuple[Estimate, ...]
    fetched_share: float
    fetched_share_all_layers: float

    def headline(self) -> dict[str, str]:
        return {
            "similarity": str(self.similarity.mean),
            "at first": f"{self.course[0].value:.3f}",
            "at last": f"{self.course[-1].value:.3f}",
            "mass": str(self.mass.mean),
            "fetched": percent(self.fetched_share),
        }


class AttentionTask(WindowTask):
    """Windows whose prompt is read in full and whose rest in decode steps, as for a perplexity."""

    def __init__(
        self, name: str, ids: Tensor, *, window: int, prompt_tokens: int, source: str
    ) -> None:
        super().__init__(name, ids, window=window, source=source)
        self._prompt = prompt_tokens

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, "prompt_tokens": self._prompt}

    def suits(self, policy: str) -> bool:
        """Whether the policy selects."""
        return cache_plan(policy, InfiniGenConfig(), StorageConfig()).selecting is not None

    @torch.no_grad()
    def measure(self, reader: Reader, index: int, shared: Any) -> Sample:
        session = reader.session
        kept = self._kept(reader, index)
        found: dict[str, dict[int, Tensor]] = {"similarity": {}, "mass": {}}

        def see(layer: int, query: Tensor, keys: Tensor) -> None:
            if layer in kept:
                measured = compare_weights(
                    session.adapter.layers[layer], query[:, :, self._prompt :], keys, kept[layer]
                )
                found["similarity"][layer], found["mass"][layer] = measured

        window = self._windows[index].to(session.model.device)
        with seeing_attention(session.model, see):
            read_window(session.adapter, window)
        layers = sorted(kept)
        by_step = torch.stack([found["similarity"][layer] for layer in layers]).mean(dim=0)
        return {
            "layers": layers,
            "course": [each.mean().item() for each in by_step.split(STEPS)],
            **{name: [each[at].mean().item() for at in layers] for name, each in found.items()},
            **fetched_of(reader),
        }

    def summarise(self, samples: Sequence[Sample], full: Sequence[Sample] | None = None) -> Kept:
        course = np.array([each["course"] for each in samples], dtype=np.float64)
        selecting, all_layers = fetched(samples)
        return Kept(
            windows=len(samples),
            window=self._windows.shape[1],
            prompt_tokens=self._prompt,
            layers=tuple(samples[0]["layers"]),
            similarity=by_layer(samples, "similarity"),
            mass=by_layer(samples, "mass"),
            course=tuple(share(column.tolist(), [1.0] * len(samples)) for column in course.T),
            fetched_share=selecting,
            fetched_share_all_layers=all_layers,
        )

    def _kept(self, reader: Reader, index: int) -> dict[int, Tensor]:
        """By layer, what each decode step attended to: ``(H_kv, T, N)``, its own token apart."""
        if reader.session.storage.capacity is not None:
            raise InputError(f"task {self.name!r} needs a home without a capacity")
        window = self._windows[index]
        prompt, decoded = window[: self._prompt], window[self._prompt :]
        reader.recorder = FetchRecorder(keep_indices=True)
        for _ in reader.start(prompt, room=len(decoded)).blocks(decoded):
            pass
        masks: dict[int, list[Tensor]] = defaultdict(list)
        for layer, selection in reader.recorder.selections:
            if layer >= FIRST_LAYER:
                masks[layer].append(selection_mask(selection, len(window))[0])
        joined = {layer: torch.cat(each, dim=1) for layer, each in masks.items()}
        if not joined or any(each.shape[1] != len(decoded) for each in joined.values()):
            raise InputError(
                f"task {self.name!r}: {reader.policy} did not select in all steps: choose a longer "
                f"prompt than {self._prompt} tokens, or a smaller min_context"
            )
        return joined


def attention(name: str, inputs: Inputs) -> AttentionTask:
    """Windows of the user's text, or of WikiText-2."""
    ids, source = read_ids(name, inputs)
    window, prompt = split_window(inputs)
    return AttentionTask(name, ids, window=window, prompt_tokens=prompt, source=source)


def compare_weights(
    spec: LayerSpec, query: Tensor, keys: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Cosine similarity and mass of every query ``(T,)``, means over the query heads.

    Parameters
    ----------
    spec
        The layer.
    query, keys
        ``(1, H, T, D)`` of the last T of N tokens, and ``(1, H_kv, N, D)``.
    kept
        ``(H_kv, T, N)`` boolean; a query's own token counts as kept.
    """
    queries, tokens = query.shape[2], keys.shape[2]
    kept = kept.to(keys.device)
    position = torch.arange(tokens - queries, tokens, device=keys.device)
    similarity, mass = [], []
    for block in torch.arange(queries).split(QUERY_BLOCK):
        place = slice(int(block[0]), int(block[-1]) + 1)
        end = tokens - queries + place.stop
        weights = attention_weights(spec, query[:, :, place], keys[:, :, :end])[0]
        own = position[place, None] == torch.arange(end, device=keys.device)
        ours = weights * (kept[:, place, :end] | own).unsqueeze(1)
        covered = ours.sum(-1)
        # cosine similarity does not change with the length of a vector, so nothing is normalised
        similarity.append((ours.norm(dim=-1) / weights.norm(dim=-1)).mean(dim=(0, 1)))
        mass.append(covered.mean(dim=(0, 1)))
    return torch.cat(similarity).cpu(), torch.cat(mass).cpu()


def attention_weights(spec: LayerSpec, query: Tensor, keys: Tensor) -> Tensor:
    """Probabilities ``(B, H_kv, G, Q, S)`` of the last Q of S tokens, causal, float32."""
    scores = grouped_scores(query, keys, spec.scaling, spec.softcap)
    seen = causal_mask(query.shape[2], keys.shape[2], keys.device)
    return scores.masked_fill_(~seen.unsqueeze(2), float("-inf")).softmax(dim=-1)
