"""Inputs of consecutive layers: against a forward by hand, and hidden states of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from calibrating import calibrate_tiny, selecting, tokens
from infinigen_kv import StorageConfig
from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.run import Subject, evaluate
from infinigen_kv_lab.evals.similarity import TENSORS, Similarity, SimilarityTask
from tiny import TINY, llama

IDS = tokens(1, 130, seed=3)[0]
WINDOW = 60


def measured(model: Any) -> Similarity:
    task = SimilarityTask("similarity", IDS, window=WINDOW, source="x")
    subject = Subject(model, calibrate_tiny(model), selecting(), StorageConfig())
    (point,) = evaluate(subject, task, ["ideal", "infinigen"])
    assert isinstance(point.result, Similarity) and point.policy == "ideal"
    return point.result


def cosines(first: Tensor, second: Tensor) -> float:
    a, b = first.double().numpy(), second.double().numpy()
    products = (a * b).sum(axis=-1)
    return float((products / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)).mean())


@torch.no_grad()
def by_hand(model: Any, ids: Tensor) -> list[dict[str, Tensor]]:
    """What every block of a Llama has, written out."""
    inner = model.model
    hidden = inner.embed_tokens(ids[None])
    rotary = inner.rotary_emb(hidden, torch.arange(ids.numel())[None])
    found = []
    for block in inner.layers:
        normed = block.input_layernorm(hidden)
        attended = block.self_attn(
            hidden_states=normed, position_embeddings=rotary, attention_mask=None
        )[0]
        middle = hidden + attended
        fed = block.mlp(block.post_attention_layernorm(middle))
        found.append(dict(zip(TENSORS, (hidden[0], normed[0], attended[0], fed[0]), strict=True)))
        hidden = middle + fed
    return found


def test_values_are_those_of_a_forward_by_hand() -> None:
    model = llama()
    result = measured(model)
    windows = [by_hand(model, IDS[start : start + WINDOW]) for start in (0, WINDOW)]
    assert result.windows == 2 and result.layers == (1, 2, 3)
    for name in TENSORS:
        mine = "attention_input" if name == "attention_input" else "block_input"
        expected = [
            np.mean([cosines(each[i][mine], each[i - 1][name]) for each in windows])
            for i in (1, 2, 3)
        ]
        assert getattr(result, name).values == pytest.approx(expected, abs=1e-5), name
        assert getattr(result, name).mean.value == pytest.approx(np.mean(expected), abs=1e-5)
        assert getattr(result, name).mean.low <= np.mean(expected) + 1e-6


@pytest.mark.parametrize("family", TINY)
@torch.no_grad()
def test_block_inputs_are_the_models_hidden_states(family: str) -> None:
    model = TINY[family]()
    result = measured(model)
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    expected = []
    for start in (0, WINDOW):
        ids = IDS[None, start : start + WINDOW]
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
        # the last one has passed the final norm: it is no block's input
        expected.append([cosines(states[i][0], states[i - 1][0]) for i in (1, 2, 3)])
    assert result.block_input.values == pytest.approx(np.mean(expected, axis=0), abs=1e-5)
    for name in TENSORS:
        assert all(-1 <= value <= 1 for value in getattr(result, name).values)


def test_only_the_full_cache_suits() -> None:
    model = llama()
    subject = Subject(model, None, selecting(), StorageConfig())
    task = SimilarityTask("similarity", IDS, window=WINDOW, source="x")
    with pytest.raises(InputError, match="suits none of the policies h2o"):
        evaluate(subject, task, ["h2o"])
    with pytest.raises(InputError, match="no whole window of 131"):
        SimilarityTask("similarity", IDS, window=131, source="x")
