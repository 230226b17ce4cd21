"""The rehearsal of every layer beside the truth, while the model attends to everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infinigen_kv.attention.dense import dense_attention, grouped_scores
from infinigen_kv.calibration.artefact import LayerCalibration
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.models.adapters.base import Adapter
from infinigen_kv.models.adapters.layer_spec import LayerSpec
from infinigen_kv.models.rerouting import reading_inputs, rerouted
from infinigen_kv.policies.query_predictor import QueryPredictor
from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.coded_partial_keys import make_partial_keys
from infinigen_kv.rehearsal.statistics import Magnitudes, Moments

See = Callable[[int, Tensor, Tensor, Tensor], None]
"""``(layer, hidden, query, keys)``: what the previous layer's attention read ``(1, N, M)``, and the
layer's own queries ``(1, H, N, D)`` and keys ``(1, H_kv, N, D)`` after RoPE."""


@contextmanager
def seeing_attention(
    model: PreTrainedModel, see: Callable[[int, Tensor, Tensor], None]
) -> Iterator[None]:
    """Inside the block the model attends in full, and ``see`` is called for every layer with its
    queries ``(1, H, N, D)`` and keys ``(1, H_kv, N, D)`` after RoPE. The model may be attached.
    """

    def attend(
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        see(layer, query, keys)
        return dense_attention(query, keys, values, scaling=scaling, softcap=softcap, mask=mask)

    with rerouted(model, attend):
        yield


@contextmanager
def watching(model: PreTrainedModel, adapter: Adapter, see: See) -> Iterator[None]:
    """As `seeing_attention`, with what the previous layer's attention read, and so without the
    first layer.
    """
    inputs: dict[int, Tensor] = {}

    def look(layer: int, query: Tensor, keys: Tensor) -> None:
        if layer > 0:
            see(layer, inputs.pop(layer - 1), query, keys)

    with seeing_attention(model, look), reading_inputs(adapter, inputs.__setitem__):
        yield


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one layer, ``(1, H_kv, G, Q, S)`` each: the true ones, the engine's, and those in
    which only one source of error is left.
    """

    true: Tensor
    engine: Tensor
    """Predicted query, partial dimensions."""
    true_query: Tensor
    """True query, partial dimensions: the error of the dimensions alone."""
    all_dimensions: Tensor
    """Predicted query, all dimensions: the error of the prediction alone."""


class LayerProbe:
    """What the rehearsal of one layer would score in decode steps after a prompt.

    Parameters
    ----------
    spec, adapter
        The layer and its model.
    fitted
        The layer's calibration.
    config
        Which rehearsal, and its partial ratio.
    hidden, query, keys
        As `See` gets them.
    prompt
        Tokens that the rehearsal chooses its partial dimensions from.
    """

    def __init__(
        self,
        spec: LayerSpec,
        adapter: Adapter,
        fitted: LayerCalibration,
        config: InfiniGenConfig,
        *,
        hidden: Tensor,
        query: Tensor,
        keys: Tensor,
        prompt: int,
    ) -> None:
        is_paper = config.rehearsal == "paper"
        self._spec, self._config = spec, config
        self._predict = QueryPredictor(adapter, spec.index, None if is_paper else fitted)
        self._hidden, self._query, self._keys = hidden, query, keys
        start = keys[:, :, :prompt]
        sums = Magnitudes.start(start, fitted.skew) if is_paper else Moments.start(start)
        position = torch.arange(prompt, device=keys.device)[None]
        sums.observe(query[:, :, :prompt], start, position, None)
        self._projection = sums.projection(config.partial_dim(spec.head_dim))

    def scores(self, step: Step) -> Scores:
        """Scores of the step's queries over all tokens up to the last of them."""
        end = step.start + step.queries
        keys = self._keys[:, :, :end]
        true = self._query[:, :, step.start : end]
        predicted = self._predict(self._hidden[:, step.start : end], step)
        partial = make_partial_keys(self._config, keys, self._projection)
        scaling, softcap = self._spec.scaling, self._spec.softcap
        return Scores(
            true=grouped_scores(true, keys, scaling, softcap),
            engine=partial.scores(predicted, scaling, softcap).float(),
            true_query=partial.scores(true, scaling, softcap).float(),
            all_dimensions=grouped_scores(predicted, keys, scaling, softcap),
        )
