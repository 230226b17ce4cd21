"""Log-likelihoods and greedy answers against plain forwards and single decode steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from calibrating import calibrate_tiny, generate, selecting, tokens
from infinigen_kv import Calibration, attach
from infinigen_kv_lab.evals.harness import scoring
from infinigen_kv_lab.evals.harness.scoring import score
from infinigen_kv_lab.evals.reading import Reader
from stepping import plain, stepped
from tiny import MAX_POSITIONS, llama

CONTEXT = tokens(1, 60, seed=11)[0].tolist()
ANSWERS = [tokens(1, length, seed=20 + length)[0].tolist() for length in (1, 5, 9)]
EXACT = 40


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


@pytest.fixture(scope="module")
def calibration(model: PreTrainedModel) -> Calibration:
    return calibrate_tiny(model)


def total(rows: Tensor, answer: list[int]) -> tuple[float, bool]:
    """Of rows ``(n, V)`` of log-probabilities, the first one for the answer's first token."""
    targets = torch.tensor(answer)
    value = rows.gather(1, targets[:, None]).sum().item()
    return value, bool((rows.argmax(-1) == targets).all())


def scored(
    model: PreTrainedModel,
    calibration: Calibration | None,
    policy: str,
    context: list[int],
    answers: list[list[int]],
    exact: int = EXACT,
) -> list[tuple[float, bool]]:
    with attach(model, calibration, selecting()) as session:
        return score(Reader(session, policy), context, answers, exact=exact)


@pytest.mark.parametrize("exact", [1, EXACT, 60, 63, 500])
def test_the_full_cache_gives_the_models_own(exact: int, model: PreTrainedModel) -> None:
    found = scored(model, None, "ideal", CONTEXT, ANSWERS, exact)
    for answer, each in zip(ANSWERS, found, strict=True):
        rows = plain(model, torch.tensor(CONTEXT + answer))[len(CONTEXT) - 1 : -1]
        value, greedy = total(rows, answer)
        assert each == (pytest.approx(value, abs=1e-3), greedy)


@pytest.mark.parametrize("exact", [EXACT, 60, 63])
@pytest.mark.parametrize("policy", ["infinigen", "h2o"])
def test_every_token_after_the_first_ones_selects(
    exact: int, policy: str, model: PreTrainedModel, calibration: Calibration
) -> None:
    """Also where the context is shorter than the tokens that are read in full."""
    found = scored(model, calibration, policy, CONTEXT, ANSWERS, exact)
    for answer, each in zip(ANSWERS, found, strict=True):
        ids = torch.tensor(CONTEXT + answer)
        rows = plain(model, ids)
        if exact < len(ids):
            rows[exact:] = stepped(model, calibration, selecting(), ids, exact, policy=policy)
        value, greedy = total(rows[len(CONTEXT) - 1 : -1], answer)
        assert each == (pytest.approx(value, abs=1e-2), greedy)


def test_greedy_answers_are_told(model: PreTrainedModel) -> None:
    answer = generate(model, torch.tensor([CONTEXT]), new=5)[0].tolist()
    wrong = [*answer[:4], (answer[4] + 1) % 128]
    found = scored(model, None, "ideal", CONTEXT, [answer, wrong, answer])
    assert [greedy for _, greedy in found] == [True, False, True]
    assert found[0] == found[2]


def test_what_does_not_fit_is_cut_at_the_start(model: PreTrainedModel) -> None:
    context, answer = tokens(1, MAX_POSITIONS + 30, seed=3)[0].tolist(), ANSWERS[2]
    (found,) = scored(model, None, "ideal", context, [answer])
    kept = (context + answer)[-MAX_POSITIONS - 1 :][:-1]
    rows = plain(model, torch.tensor(kept))[-len(answer) :]
    assert found == (pytest.approx(total(rows, answer)[0], abs=1e-3), False)


def test_generation_is_that_of_transformers_and_stops(model: PreTrainedModel) -> None:
    expected = generate(model, torch.tensor([CONTEXT]), new=12)[0].tolist()

    def made(**changes: Any) -> list[int]:
        settings: dict[str, Any] = {
            "exact": EXACT,
            "new_tokens": 12,
            "end_tokens": set(),
            **changes,
        }
        with attach(model) as session:
            return scoring.generate(
                Reader(session, "ideal"), CONTEXT, **{"is_over": lambda made: False, **settings}
            )

    assert made() == expected
    assert made(end_tokens={expected[5]}) == expected[: expected.index(expected[5])]
    assert made(is_over=lambda tokens: len(tokens) == 3) == expected[:3]
    assert made(new_tokens=1) == expected[:1]


def test_generation_selects(model: PreTrainedModel, calibration: Calibration) -> None:
    with attach(model, calibration, selecting()) as session:
        reader = Reader(session, "infinigen")
        found = scoring.generate(
            reader,
            CONTEXT,
            exact=EXACT,
            new_tokens=12,
            end_tokens=set(),
            is_over=lambda made: False,
        )
    assert 0.0 < reader.fetched_share < 0.31
    rows = stepped(model, calibration, selecting(), torch.tensor(CONTEXT + found), EXACT)
    assert found == rows[len(CONTEXT) - 1 - EXACT : -1].argmax(-1).tolist()
