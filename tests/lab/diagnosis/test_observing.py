"""Figures of the layers, against plain loops over what Transformers itself shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from calibrating import calibrate_tiny, selecting, tokens
from infinigen_kv import Calibration, InfiniGenConfig, attach
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv_lab.diagnosis.evidence import LayerEvidence
from infinigen_kv_lab.diagnosis.observing import LayerObserver
from infinigen_kv_lab.evals.run import Subject, evaluate
from infinigen_kv_lab.evals.speculation import PLACES, QUERIES, Speculation, SpeculationTask
from tiny import llama

PROMPT, DECODED = 50, 32
IDS = tokens(1, PROMPT + DECODED, seed=4)[0]
# they overlap, as the window is short
STARTS = {PROMPT + round(at * (DECODED - QUERIES) / (PLACES - 1)) for at in range(PLACES)}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


@pytest.fixture(scope="module")
def calibration(model: PreTrainedModel) -> Calibration:
    return calibrate_tiny(model)


def observe(
    model: PreTrainedModel, calibration: Calibration, config: InfiniGenConfig, *windows: Tensor
) -> dict[int, LayerEvidence]:
    with attach(model, calibration, config) as session:
        observer = LayerObserver(session, calibration, prompt=PROMPT)
        for window in windows:
            observer.read(window)
        return {each.layer: each for each in observer.evidence({2: 0.5})}


@torch.no_grad()
def inputs_and_weights(model: PreTrainedModel, ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What each layer's attention reads ``(N, M)``, and its weights ``(H, N, N)``."""
    model.set_attn_implementation("eager")
    try:
        shown = model(input_ids=ids[None], output_attentions=True, output_hidden_states=True)
    finally:
        model.set_attn_implementation("sdpa")
    layers = model.model.layers
    inputs = [
        layer.input_layernorm(hidden)[0]
        for layer, hidden in zip(layers, shown.hidden_states, strict=False)
    ]
    return inputs, [weights[0] for weights in shown.attentions]


def test_similarity_query_and_concentration(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    found = observe(model, calibration, selecting(), IDS)
    inputs, weights = inputs_and_weights(model, IDS)
    assert found.keys() == {1, 2, 3}
    assert (found[2].harm, found[1].harm == found[1].harm) == (0.5, False)
    for layer, figures in found.items():
        before, own = inputs[layer - 1].double(), inputs[layer].double()
        cosines = (before * own).sum(-1) / (before.norm(dim=-1) * own.norm(dim=-1))
        assert figures.similarity == pytest.approx(cosines.mean().item(), abs=1e-5)
        weight = model.model.layers[layer].self_attn.q_proj.weight.detach().double().T
        fitted = calibration.layers[layer]
        extended = torch.cat([before, torch.ones(len(before), 1)], dim=1)
        correction = extended @ fitted.down.double() @ fitted.up.double()
        places = torch.tensor(
            [position for start in STARTS for position in range(start, start + QUERIES)]
        )
        true = (own @ weight)[places]  # RoPE turns queries and leaves lengths
        power = true.square().sum()
        missed = (true - (before @ weight)[places]).square().sum() / power
        assert figures.own_weights == pytest.approx(missed.item(), rel=1e-4)
        missed = (true - (before @ weight + correction)[places]).square().sum() / power
        assert figures.unexplained == pytest.approx(missed.item(), rel=1e-4)
        assert figures.calibration_unexplained == calibration.report[str(layer)]["unexplained"]
        shares = []
        for head in weights[layer]:
            for position in places.tolist():
                carried, count = 0.0, 0
                for weight_of in sorted(head[position, : position + 1].tolist(), reverse=True):
                    if carried >= 0.9:
                        break
                    carried, count = carried + weight_of, count + 1
                shares.append(count / (position + 1))
        assert figures.concentration == pytest.approx(sum(shares) / len(shares), abs=2e-3)


def test_recall_and_mass_are_those_of_the_speculation_task(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    config = selecting(max_fetch=0.2)
    second = tokens(1, PROMPT + DECODED, seed=6)[0]
    found = observe(model, calibration, config, IDS, second)
    task = SpeculationTask(
        torch.cat([IDS, second]), window=PROMPT + DECODED, prompt_tokens=PROMPT, source=""
    )
    subject = Subject(model, calibration, config, StorageConfig())
    (point,) = evaluate(subject, task, ["infinigen"])
    expected = point.result
    assert isinstance(expected, Speculation)
    for place, layer in enumerate(expected.layers):
        ours = found[layer]
        assert ours.head_coverage == pytest.approx(expected.engine.coverage.values[place])
        assert ours.fetched == pytest.approx(expected.chosen[place])
        for name, variant in (
            ("recall", expected.engine),
            ("recall_true_query", expected.true_query),
            ("recall_all_dimensions", expected.all_dimensions),
        ):
            values = variant.recall.values[place]
            assert getattr(ours, name) == pytest.approx(sum(values) / len(values), abs=1e-6)
        assert ours.lost + ours.coverage == 1
        assert 0 <= ours.missed <= ours.lost
        assert ours.wanted > ours.fetched <= 0.2


def test_what_would_be_wanted_without_the_limit(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    limited = observe(model, calibration, selecting(max_fetch=0.1), IDS)
    free = observe(model, calibration, selecting(max_fetch=1.0), IDS)
    for layer in limited:
        assert limited[layer].wanted == free[layer].wanted == free[layer].fetched
        assert limited[layer].fetched < free[layer].fetched


def test_the_papers_rehearsal_uses_the_layers_own_weights(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    found = observe(model, calibration, selecting(rehearsal="paper"), IDS)
    for layer, figures in found.items():
        assert figures.unexplained == figures.own_weights
        assert figures.calibration_unexplained == calibration.report[str(layer)]["own_weights"]
