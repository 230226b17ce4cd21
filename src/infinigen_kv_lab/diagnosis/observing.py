"""What each layer's rehearsal says beside the truth, with what explains it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from infinigen_kv.calibration.artefact import Calibration, LayerCalibration
from infinigen_kv.models.adapters.layer_spec import LayerSpec
from infinigen_kv.policies.layer_roles import speculated_layers
from infinigen_kv.policies.query_predictor import QueryPredictor
from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.select import select_tokens
from infinigen_kv.session.attach import Session
from infinigen_kv_lab.diagnosis.evidence import NAN, LayerEvidence, known_mean
from infinigen_kv_lab.evals.agreement import compare
from infinigen_kv_lab.evals.attention import attention_weights
from infinigen_kv_lab.evals.probe import LayerProbe, Scores, watching
from infinigen_kv_lab.evals.similarity import NORMED, cosine, watching_blocks
from infinigen_kv_lab.evals.sparsity import tokens_needed
from infinigen_kv_lab.evals.speculation import spread_steps

Figures = dict[str, list[float]]
"""Measures by name, one number or one for each head."""


class LayerObserver:
    """Reads windows of text with full attention, and keeps what each selecting layer would do.

    Parameters
    ----------
    session
        An attached model.
    calibration
        The session's.
    prompt
        Tokens of a window that the rehearsal learns from; places after it are measured.
    """

    def __init__(self, session: Session, calibration: Calibration, *, prompt: int) -> None:
        self._session = session
        self._calibration = calibration
        self._prompt = prompt
        self.layers = sorted(speculated_layers(session.adapter.layers, session.config))
        self._found: dict[int, list[Figures]] = {layer: [] for layer in self.layers}

    @torch.no_grad()
    def read(self, window: Tensor) -> None:
        """One window ``(P + T,)``."""
        session = self._session
        window = window.to(session.model.device)
        steps = spread_steps(session.config, self._prompt, len(window), window.device)
        inputs = _Inputs()

        def see(layer: int, hidden: Tensor, query: Tensor, keys: Tensor) -> None:
            if layer in self._found:
                spec = session.adapter.layers[layer]
                figures = self._measure(spec, hidden, query, keys, steps)
                figures["similarity"] = [inputs.similarity[layer]]
                self._found[layer].append(figures)

        with (
            watching_blocks(session.adapter, inputs.see),
            watching(session.model, session.adapter, see),
        ):
            session.adapter.decoder(input_ids=window[None], use_cache=False)

    def evidence(self, harm: Mapping[int, float]) -> tuple[LayerEvidence, ...]:
        """The layers, means over the windows read; ``harm`` by layer is added as it is."""
        return tuple(
            self._evidence(layer, self._found[layer], harm.get(layer, NAN)) for layer in self.layers
        )

    def _evidence(self, layer: int, windows: list[Figures], harm: float) -> LayerEvidence:
        means = {name: _mean(each[name] for each in windows) for name in windows[0]}
        one = {name: known_mean(values) for name, values in means.items()}
        fit = self._calibration.report.get(str(layer), {})
        is_paper = self._session.config.rehearsal == "paper"
        return LayerEvidence(
            layer=layer,
            similarity=one["similarity"],
            unexplained=one["unexplained"],
            own_weights=one["own_weights"],
            calibration_unexplained=fit.get("own_weights" if is_paper else "unexplained", NAN),
            recall=one["engine.recall"],
            recall_true_query=one["true_query.recall"],
            recall_all_dimensions=one["all_dimensions.recall"],
            coverage=one["engine.coverage"],
            coverage_true_query=one["true_query.coverage"],
            coverage_all_dimensions=one["all_dimensions.coverage"],
            best_coverage=one["best_coverage"],
            concentration=one["concentration"],
            fetched=one["chosen"],
            wanted=one["wanted"],
            harm=harm,
            head_coverage=tuple(means["engine.coverage"]),
        )

    def _measure(
        self, spec: LayerSpec, hidden: Tensor, query: Tensor, keys: Tensor, steps: list[Step]
    ) -> Figures:
        """All but the similarity; the mean over the steps."""
        config, adapter = self._session.config, self._session.adapter
        fitted = self._calibration.layers[spec.index]
        probe = LayerProbe(
            spec,
            adapter,
            fitted,
            config,
            hidden=hidden,
            query=query,
            keys=keys,
            prompt=self._prompt,
        )
        alpha = config.alpha_of(spec.index)
        found: list[Figures] = []
        for step in steps:
            scores = probe.scores(step)
            found.append(
                {
                    **compare(scores, step, alpha, ranked=False),
                    "wanted": [wanted_share(scores, step, alpha)],
                    "concentration": [concentration(spec, query, keys, step)],
                }
            )
        figures = {name: _mean(each[name] for each in found) for name in found[0]}
        own = self._unexplained(spec, None, hidden, query, steps)
        used = None if config.rehearsal == "paper" else fitted
        mine = own if used is None else self._unexplained(spec, used, hidden, query, steps)
        return {**figures, "own_weights": [own], "unexplained": [mine]}

    def _unexplained(
        self,
        spec: LayerSpec,
        fitted: LayerCalibration | None,
        hidden: Tensor,
        query: Tensor,
        steps: list[Step],
    ) -> float:
        """E|q - prediction|^2 / E|q|^2 over the steps' queries, as the attention uses them."""
        predict = QueryPredictor(self._session.adapter, spec.index, fitted)
        error = power = 0.0
        for step in steps:
            here = slice(step.start, step.start + step.queries)
            true = query[:, :, here].double()
            guess = predict(hidden[:, here], step).double()
            error += (true - guess).square().sum().item()
            power += true.square().sum().item()
        return error / power if power else NAN


def wanted_share(scores: Scores, step: Step, alpha: float) -> float:
    """Share of the cached tokens that would be chosen without ``max_fetch``."""
    config = replace(step.config, max_fetch=1.0)
    free = Step(
        start=step.start,
        queries=step.queries,
        rows=step.rows,
        visible=step.visible,
        position_ids=step.position_ids,
        selecting=True,
        config=config,
    )
    counts = select_tokens(scores.engine.clone(), free.candidates, alpha).counts
    assert counts is not None
    return (counts / step.before).double().mean().item()


def concentration(spec: LayerSpec, query: Tensor, keys: Tensor, step: Step) -> float:
    """Share of a query's tokens, its own included, that carry `sparsity.MASS` of its attention.

    ``query`` ``(1, H, N, D)`` and ``keys`` ``(1, H_kv, N, D)`` are the window's. The fewest tokens
    that do, the mean over heads and the step's queries.
    """
    end = step.start + step.queries
    weights = attention_weights(spec, query[:, :, step.start : end], keys[:, :, :end])
    seen = torch.arange(step.start + 1, end + 1, device=weights.device)
    return (tokens_needed(weights) / seen).double().mean().item()


class _Inputs:
    """Cosine of what the attention of consecutive layers reads, by the later layer."""

    def __init__(self) -> None:
        self.similarity: dict[int, float] = {}
        self._before: Tensor | None = None

    def see(self, layer: int, name: str, tensor: Tensor) -> None:
        """As `similarity.SeeTensor`; a layer's value is there once its attention runs."""
        if name != NORMED:
            return
        if self._before is not None:
            self.similarity[layer] = cosine(tensor, self._before.to(tensor.device))
        self._before = tensor


def _mean(rows: Iterator[list[float]]) -> list[float]:
    """Mean of each column; NaN (nothing to choose) is left out, and is the mean of nothing else."""
    table = np.array(list(rows), dtype=np.float64)
    known = ~np.isnan(table)
    counts = known.sum(axis=0)
    sums = np.where(known, table, 0.0).sum(axis=0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan).tolist()
