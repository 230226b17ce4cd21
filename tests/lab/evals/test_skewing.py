"""Columns of queries and keys: their magnitudes in plain loops, and what the skew does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from calibrating import selecting, tokens
from infinigen_kv import Calibration, StorageConfig, attach
from infinigen_kv_lab.evals.probe import seeing_attention
from infinigen_kv_lab.evals.run import Subject, evaluate
from infinigen_kv_lab.evals.skewing import Skewing, SkewingTask, column_shares, without_skew

IDS = tokens(1, 60, seed=4)[0]


def measured(model: PreTrainedModel, calibration: Calibration) -> Skewing:
    task = SkewingTask("skew", IDS, window=60, source="x")
    subject = Subject(model, calibration, selecting(), StorageConfig())
    (point,) = evaluate(subject, task, ["ideal"])
    assert isinstance(point.result, Skewing)
    return point.result


def test_shares_are_those_of_plain_loops(model: PreTrainedModel, calibration: Calibration) -> None:
    result = measured(model, calibration)
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    with (
        torch.no_grad(),
        attach(model) as session,
        seeing_attention(model, lambda layer, query, keys: seen.update({layer: (query, keys)})),
    ):
        session.adapter.decoder(input_ids=IDS[None], use_cache=False)
    assert result.layers == (1, 2, 3)
    for at, layer in enumerate(result.layers):
        skews = calibration.layers[layer].skew.double().numpy()
        for name, tensor in zip(("query", "key"), seen[layer], strict=True):
            for suffix, is_skewed in (("", False), ("_skewed", True)):
                curves = []
                heads = tensor[0].double().numpy()  # (H or H_kv, N, D)
                for head, values in enumerate(heads):
                    skew = skews[head * len(skews) // len(heads)]
                    turned = values @ skew if is_skewed else values
                    sums = np.sort(np.abs(turned).sum(axis=0))[::-1]
                    curves.append(sums / sums.sum())
                expected = np.mean(curves, axis=0)
                assert result.curves[name + suffix][at] == pytest.approx(expected, abs=1e-5)
                top = expected[: round(0.3 * len(expected))].sum()
                assert getattr(result, name + suffix).values[at] == pytest.approx(top, abs=1e-5)


def test_an_even_and_an_uneven_matrix() -> None:
    assert column_shares(torch.ones(1, 2, 5, 4)) == pytest.approx([0.25] * 4)
    one = torch.zeros(1, 1, 5, 4)
    one[..., 2] = -3.0
    assert column_shares(one) == [1.0, 0.0, 0.0, 0.0]


def test_without_a_skew(model: PreTrainedModel, calibration: Calibration) -> None:
    plain = without_skew(calibration)
    assert plain.settings != calibration.settings, "points of one are not taken for the other's"
    result = measured(model, plain)
    assert result.query_skewed.values == pytest.approx(result.query.values, abs=1e-6)
    skewed = measured(model, calibration)
    assert skewed.query.values == pytest.approx(result.query.values, abs=1e-6)
    assert skewed.query_skewed.mean.value != pytest.approx(result.query.mean.value, abs=1e-3)
    for layer, fitted in plain.layers.items():
        assert torch.equal(fitted.down, calibration.layers[layer].down)
        assert torch.equal(fitted.skew[0], torch.eye(fitted.skew.shape[-1]))
