"""Answers against greedy generation and plain forwards; how they are counted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from calibrating import generate, selecting, tokens
from infinigen_kv import Calibration, InfiniGenConfig, attach
from infinigen_kv_lab.evals.reading import Reader
from infinigen_kv_lab.evals.retrieval import Cell, ask, summarise_answers
from stepping import plain, stepped

PROMPT = tokens(1, 60, seed=5)[0]
QUESTION = tokens(1, 7, seed=6)[0]


def asked(
    model: PreTrainedModel,
    calibration: Calibration | None,
    policy: str,
    turns: list[tuple[Tensor, Tensor]],
    config: InfiniGenConfig | None = None,
) -> list[dict[str, object]]:
    with attach(model, calibration, config) as session:
        return ask(Reader(session, policy).start(PROMPT, room=100), turns)


@pytest.mark.parametrize("question", [QUESTION, QUESTION[:0]])
def test_right_is_what_greedy_decoding_gives(question: Tensor, model: PreTrainedModel) -> None:
    prompt = torch.cat([PROMPT, question])
    answer = generate(model, prompt[None], new=4)[0]
    (found,) = asked(model, None, "ideal", [(question, answer)])
    assert found["right"] is True
    assert found["expected"] == answer.tolist()
    scores = plain(model, torch.cat([prompt, answer]))
    places = range(len(prompt) - 1, len(prompt) + 3)
    total = sum(scores[at, token].item() for at, token in zip(places, answer, strict=True))
    assert found["log_probability"] == pytest.approx(total, abs=1e-3)
    for place in range(4):
        wrong = answer.clone()
        wrong[place] = (wrong[place] + 1) % 128
        (found,) = asked(model, None, "ideal", [(question, wrong)])
        assert found["right"] is False


def test_later_turns_select_from_all_before_them(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    turns = [(tokens(1, 6, seed=i)[0], tokens(1, 3, seed=i + 50)[0]) for i in range(4)]
    found = asked(model, calibration, "infinigen", turns, selecting())
    everything = torch.cat([PROMPT, *(piece for turn in turns for piece in turn)])
    steps = stepped(model, calibration, selecting(), everything, len(PROMPT))
    at = 0
    for (question, answer), each in zip(turns, found, strict=True):
        at += len(question)
        rows = steps[at - 1 : at - 1 + len(answer)]
        assert each["expected"] == rows.argmax(-1).tolist()
        total = rows.gather(1, answer[:, None]).sum().item()
        assert each["log_probability"] == pytest.approx(total, abs=1e-2)
        at += len(answer)


def sample(length: int, *answers: tuple[float, bool, str]) -> dict[str, object]:
    return {
        "length": length,
        "fetched": 0.1,
        "fetched_all_layers": None,
        "answers": [
            {"depth": depth, "right": right, "field": field, "log_probability": -1.0 - right}
            for depth, right, field in answers
        ],
    }


def test_answers_are_counted_by_length_depth_and_field() -> None:
    samples = [
        sample(1024, (0.0, True, "a"), (0.24, False, "b"), (1.0, True, "a")),
        sample(1024, (0.26, True, "b")),
        sample(2048, (0.5, False, "a")),
    ]
    full = [
        sample(1024, (0.0, True, "a"), (0.24, True, "b"), (1.0, True, "a")),
        *samples[1:],
    ]
    found = summarise_answers(samples, full, too_long=2)
    assert (found.right, found.asked, found.too_long) == (3, 5, 2)
    assert found.accuracy.value == 0.6
    assert found.whole == pytest.approx(1 / 3)
    assert found.difference is not None and found.difference.value == pytest.approx(-0.2)
    assert found.cells == (
        Cell(1024, 0.0, 1, 1), Cell(1024, 0.25, 2, 1), Cell(1024, 1.0, 1, 1), Cell(2048, 0.5, 1, 0),
    )  # fmt: skip
    assert found.by_field == {"a": pytest.approx(2 / 3), "b": 0.5}
    assert found.by_turn == (pytest.approx(2 / 3), 0.0, 1.0)
    assert found.headline()["first, last turn"] == "66.7 %, 100.0 %"
    assert summarise_answers(samples[1:], None, too_long=0).by_turn == ()
    assert found.log_probability == pytest.approx(-1.6)
    assert found.fetched_share == pytest.approx(0.1)
    assert math.isnan(found.fetched_share_all_layers)
    assert summarise_answers(samples, None, too_long=0).difference is None
