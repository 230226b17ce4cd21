"""Tokens that the attention needs: counted in plain loops over the model's own weights."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrating import selecting, tokens
from command_line import TEXT, tokenizer
from infinigen_kv import StorageConfig
from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.registry import make_task
from infinigen_kv_lab.evals.run import Subject, evaluate
from infinigen_kv_lab.evals.sparsity import (
    QUERIES,
    Sparsity,
    SparsityTask,
    count_needed,
    tokens_needed,
    track,
)
from infinigen_kv_lab.evals.task import Inputs, TaskOptions
from own_attention import own_weights
from tiny import TINY

LENGTHS = (40, 90)
IDS = tokens(1, 2 * 90, seed=9)[0]


def measured(model: Any) -> Sparsity:
    task = SparsityTask("sparsity", IDS, lengths=LENGTHS, source="x")
    (point,) = evaluate(Subject(model, None, selecting(), StorageConfig()), task, ["ideal"])
    assert isinstance(point.result, Sparsity)
    return point.result


def counted(row: np.ndarray[Any, Any]) -> int:
    """How many of the largest weights it takes to reach nine tenths."""
    total = 0.0
    for count, weight in enumerate(sorted(row, reverse=True), start=1):
        total += weight
        if total >= 0.9:
            return count
    raise AssertionError


@pytest.mark.parametrize(("family", "full"), [("llama", (0, 1, 2, 3)), ("gemma2", (1, 3))])
def test_counts_are_those_of_plain_loops(family: str, full: tuple[int, ...]) -> None:
    model = TINY[family]()
    result = measured(model)
    assert result.layers == full and result.windows == 2
    windows = [own_weights(model, IDS[at : at + 90]) for at in (0, 90)]
    for place, length in enumerate(LENGTHS):
        found = result.lengths[place]
        assert found.length == length
        for at, layer in enumerate(full):
            counts, shares = [], []
            for weights in windows:
                for head in weights[layer]:
                    for query in range(length - QUERIES, length):
                        counts.append(counted(head[query, : query + 1]))
                        shares.append(counts[-1] / (query + 1))
            assert found.needed.values[at] == pytest.approx(np.mean(counts), rel=2e-3)
            assert found.needed_share.values[at] == pytest.approx(np.mean(shares), rel=2e-3)
            few = np.mean([share < 0.01 for share in shares])
            assert found.few.values[at] == pytest.approx(few, abs=2e-3)
            bins = np.zeros(len(found.histogram[at]))
            for count in counts:
                bins[int(math.log2(count))] += 1 / len(counts)
            assert found.histogram[at] == pytest.approx(bins, abs=5e-3)
    assert result.few.value == pytest.approx(np.mean(result.lengths[-1].few.values))


def test_tokens_needed_of_simple_weights() -> None:
    rows = torch.tensor([[0.5, 0.05, 0.3, 0.15], [0.25, 0.25, 0.25, 0.25], [0.0, 0.95, 0.05, 0.0]])
    assert tokens_needed(rows).tolist() == [3, 4, 1]
    # 4 tokens seen by the last query: none of the counts is under 1 % of them
    found = count_needed(rows[None])
    assert found["needed"] == pytest.approx(8 / 3) and found["few"] == 0.0
    assert found["histogram"] == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    one = torch.zeros(1, 1, 400)
    one[..., 7] = 1.0
    assert count_needed(one)["few"] == 1.0


def test_keys_over_time() -> None:
    weights = torch.full((4, 2, 8), 0.01)
    weights[:, 0, 0] = torch.tensor([0.9, 0.8, 0.2, 0.1])  # a sink may fall, and is no example
    weights[:, 0, 7] = 0.5
    weights[:, 1, 5] = torch.tensor([0.1, 0.3, 0.5, 0.7])
    weights[:, 1, 6] = torch.tensor([0.7, 0.5, 0.3, 0.1])
    found = {each["course"]: each for each in track(5, [8, 10, 12, 14], weights)}
    assert (found["largest"]["head"], found["largest"]["key"]) == (0, 7)
    assert (found["rising"]["head"], found["rising"]["key"]) == (1, 5)
    assert (found["falling"]["head"], found["falling"]["key"]) == (1, 6)
    assert found["rising"]["weights"] == pytest.approx([0.1, 0.3, 0.5, 0.7])
    assert found["falling"]["positions"] == [8, 10, 12, 14] and found["largest"]["layer"] == 5


def test_weights_of_tracked_keys_are_the_models() -> None:
    model = TINY["llama"]()
    result = measured(model)
    weights = own_weights(model, IDS[:90])
    for each in result.tracks:
        assert each.positions[0] == 45 and each.key < 45 and len(each.positions) == 45
        row = weights[each.layer][each.head, 45:, each.key]
        assert each.weights == pytest.approx(row, abs=1e-5)


def test_means_over_pieces_of_a_long_window() -> None:
    model = TINY["llama"]()
    ids = tokens(1, 300, seed=2)[0]
    task = SparsityTask("sparsity", ids, lengths=(300,), source="x")
    (point,) = evaluate(Subject(model, None, selecting(), StorageConfig()), task, ["ideal"])
    assert isinstance(point.result, Sparsity)
    track = point.result.tracks[0]
    row = own_weights(model, ids)[track.layer][track.head, :, track.key]
    edges = [*track.positions, 300]
    expected = [row[start:end].mean() for start, end in itertools.pairwise(edges)]
    assert len(expected) == 48 and track.weights == pytest.approx(expected, abs=1e-5)


def test_lengths_and_texts(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text(TEXT, encoding="utf-8")
    options = TaskOptions(text=path, lengths=(128, 256))
    made = make_task("sparsity", Inputs(tokenizer(), 512, None, options))
    assert len(made) == len(TEXT) // 256
    with pytest.raises(InputError, match="longer than the model's 200 positions"):
        make_task("sparsity", Inputs(tokenizer(), 200, None, options))
    with pytest.raises(InputError, match="--text FILE"):
        make_task("sparsity", Inputs(tokenizer(), 512, None, TaskOptions(lengths=(128,))))
