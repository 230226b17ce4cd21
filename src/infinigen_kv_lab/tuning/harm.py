"""How much each layer's selection alone changes the next-token distribution, by alpha.

To run the model once for every layer and alpha would take hours. Instead, one forward with full
attention computes beside each layer's output what it would have been with a selection, and one
backward pass says how much such a change matters. With g the gradient of log p(y) by a layer's
attention output, y drawn from the model itself, and d the change of that output,
KL(full || selected) is E[(g . d)^2] / 2 to second order (the Fisher information of the logits).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from infinigen_kv.attention.dense import dense_attention, grouped_scores
from infinigen_kv.cache.forward import forward
from infinigen_kv.cache.masks import mask_of_no_tail
from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import InfiniGenError
from infinigen_kv.models.adapters.base import Adapter
from infinigen_kv.models.adapters.layer_spec import LayerSpec
from infinigen_kv.models.rerouting import reading_inputs, rerouted
from infinigen_kv.policies.query_predictor import QueryPredictor
from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.coded_partial_keys import make_partial_keys
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.select import select_tokens, selection_mask
from infinigen_kv.rehearsal.statistics import Moments
from infinigen_kv.rehearsal.tail import ValueMap, attention_in_blocks
from infinigen_kv_lab.kit.divergence import log_probabilities

DRAWS = 4  # of the next tokens, each with a backward pass


class HarmMeter:
    """Measures harms on windows of text.

    Parameters
    ----------
    model, adapter, calibration
        The model, not attached, and what was calibrated for it.
    config
        Settings of the selection but alpha.
    layers
        Those that select.
    alphas
        To be measured.
    seed
        Of the tokens that are drawn, in every window.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: Adapter,
        calibration: Calibration,
        config: InfiniGenConfig,
        layers: Sequence[int],
        alphas: Sequence[float],
        *,
        seed: int = 0,
    ) -> None:
        self._model = model
        self._adapter = adapter
        self._config = config
        self._alphas = tuple(alphas)
        self._layers = {spec.index: spec for spec in adapter.layers if spec.index in set(layers)}
        self._predict = {
            index: QueryPredictor(adapter, index, calibration.layers[index])
            for index in self._layers
        }
        self._seed = seed

    def read(self, prompt: Tensor, decoded: Tensor) -> Tensor:
        """One window: ``prompt`` ``(P,)`` is attended to in full, ``decoded`` ``(T,)`` selects.

        Returns
        -------
        Tensor
            ``(layers, alphas)`` float64: nats per token.

        Raises
        ------
        InfiniGenError
            If the model computes NaN or infinity.
        """
        pass_ = _Pass(self, decoded.numel())
        cache = DynamicCache(config=self._model.config)
        with (
            rerouted(self._model, pass_.attend),
            reading_inputs(self._adapter, pass_.keep_input),
        ):
            with torch.no_grad():
                forward(self._model, prompt[None], cache, last_only=True)
            pass_.begin_decoding(prompt.numel())
            with torch.enable_grad():
                logits = forward(self._model, decoded[None], cache)[0]
        scores = log_probabilities(logits)
        if bool(scores.isnan().any()):
            raise InfiniGenError(
                "the model's logits contain NaN or infinity, so nothing can be tuned; check the "
                "model's weights and dtype (float16 may overflow where bfloat16 does not)"
            )
        return self._of(scores, pass_) / decoded.numel()

    def _of(self, scores: Tensor, pass_: _Pass) -> Tensor:
        """Harms of one window, summed over its tokens."""
        # a window's own, so that its harms do not depend on which others were read before
        random = torch.Generator().manual_seed(self._seed)
        found = torch.zeros(len(self._layers), len(self._alphas), dtype=torch.float64)
        changes = [pass_.changes[index] for index in self._layers]
        offsets = [pass_.offsets[index] for index in self._layers]
        chances = scores.detach().exp().cpu()
        for draw in range(DRAWS):
            drawn = torch.multinomial(chances, 1, generator=random).to(scores.device)
            gained = scores.gather(1, drawn).sum()
            slopes = torch.autograd.grad(gained, offsets, retain_graph=draw + 1 < DRAWS)
            for row, (slope, change) in enumerate(zip(slopes, changes, strict=True)):
                # (A, T, H, D) with (T, H, D): what each token's change does
                effect = (change * slope[0].float()).sum(dim=(2, 3)).double()
                found[row] += (effect.square().sum(1) / (2 * DRAWS)).cpu()
        return found


class _Pass:
    """Sees the layers of one window: first the prompt, then the decoded tokens."""

    def __init__(self, meter: HarmMeter, queries: int) -> None:
        self._meter = meter
        self._queries = queries
        self._inputs: dict[int, Tensor] = {}
        self._sums: dict[int, Moments] = {}
        self._step: Step | None = None
        self.changes: dict[int, Tensor] = {}
        """``(A, T, H, D)`` of each layer's attention output."""
        self.offsets: dict[int, Tensor] = {}
        """``(1, T, H, D)`` zeros that were added to it."""

    def begin_decoding(self, start: int) -> None:
        position = torch.arange(start, start + self._queries, device=self._meter._model.device)
        self._step = Step(
            start=start,
            queries=self._queries,
            rows=1,
            visible=None,
            position_ids=position[None],
            selecting=True,
            config=self._meter._config,
        )

    def keep_input(self, layer: int, hidden: Tensor) -> None:
        self._inputs[layer] = hidden.detach()

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        """``(1, Q, H, D_v)``."""
        spec = self._meter._layers.get(layer)
        if self._step is None or spec is None:
            if spec is not None:
                self._observe(layer, query, keys, values)
            return dense_attention(query, keys, values, scaling=scaling, softcap=softcap, mask=mask)
        scores = grouped_scores(query, keys, scaling, softcap)
        allowed = self._step.candidates.allowed
        assert allowed is not None
        own = torch.zeros_like(allowed)
        place = torch.arange(self._queries, device=allowed.device)
        own[..., place, self._step.start + place] = True
        output = _weighted(scores, allowed | own, values)
        with torch.no_grad():
            moments = self._sums.pop(spec.index)
            config = self._meter._config
            rank = config.partial_dim(spec.head_dim)
            partial = make_partial_keys(config, keys, moments.projection(rank))
            chosen = [each | own for each in self._selections(spec, partial)]
            if self._meter._config.tail:
                value_map = ValueMap.fit(partial.projection, moments)
                outputs = self._with_tails(query, keys, values, chosen, partial, value_map, spec)
            else:
                outputs = [_weighted(scores, each, values) for each in chosen]
            self.changes[layer] = torch.cat([each - output for each in outputs]).float()
        self.offsets[layer] = torch.zeros_like(output, requires_grad=True)
        return output + self.offsets[layer]

    def _observe(self, index: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        position = torch.arange(keys.shape[2], device=keys.device)[None]
        self._sums[index] = Moments.start(keys, values)
        self._sums[index].observe(query, keys, position, None, values)

    def _selections(self, spec: LayerSpec, partial: PartialKeys) -> Iterator[Tensor]:
        """``(1, H_kv, Q, S)`` for each alpha."""
        meter, step = self._meter, self._step
        assert step is not None
        query = meter._predict[spec.index](self._inputs[spec.index - 1], step)
        scores = partial.scores(query, spec.scaling, spec.softcap).float()
        for alpha in meter._alphas:
            selection = select_tokens(scores.clone(), step.candidates, alpha)
            yield selection_mask(selection, partial.length)

    def _with_tails(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        attended: Sequence[Tensor],
        partial: PartialKeys,
        value_map: ValueMap,
        spec: LayerSpec,
    ) -> list[Tensor]:
        """Attention ``(1, Q, H, D_v)`` to what is ``attended`` to, and to the rest as estimated."""
        assert self._step is not None
        return [
            attention_in_blocks(
                query, keys, values, each, partial, value_map, mask_of_no_tail(each, self._step),
                scaling=spec.scaling, softcap=spec.softcap,
            )
            for each in attended
        ]  # fmt: skip


def _weighted(scores: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """Attention ``(1, Q, H, D_v)`` from scores ``(1, H_kv, G, Q, S)`` where ``mask`` allows."""
    weights = scores.masked_fill(~mask.unsqueeze(2), float("-inf")).softmax(-1).to(values.dtype)
    rows, heads, group, queries, tokens = weights.shape
    output = weights.view(rows, heads, group * queries, tokens) @ values
    return output.view(rows, heads * group, queries, -1).transpose(1, 2)
