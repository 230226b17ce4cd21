"""The survivors' bookkeeping against dictionaries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinigen_kv_lab.baselines.survivors import Survivors

ROWS, HEADS = 2, 2
State = list[list[dict[int, float]]]  # by row and head: what is known of each token


def fresh() -> Survivors:
    return Survivors.none(ROWS, HEADS, torch.empty(0), (1, torch.float32))


def contents(state: Survivors) -> State:
    """Tokens and facts, checked to be the same number in all heads, no token twice."""
    held = state.held() * (ROWS if len(state.held()) == 1 else 1)
    found: State = []
    for row in range(ROWS):
        real = [True] * state.columns if state.real is None else state.real[row].tolist()
        found.append([])
        for head in range(HEADS):
            places = state.positions[row, head].tolist()
            facts = state.facts[row, head, :, 0].tolist()
            known = [
                (at, fact) for at, fact, is_real in zip(places, facts, real, strict=True) if is_real
            ]
            assert len(dict(known)) == len(known) == held[row]
            found[row].append(dict(known))
    return found


def noted(state: Survivors, seed: int) -> Survivors:
    facts = torch.rand(state.facts.shape, generator=torch.Generator().manual_seed(seed))
    return Survivors(facts, state.index, state.real, state.length)


@settings(max_examples=60)
@given(
    deeds=st.lists(
        st.tuples(st.sampled_from(["add", "best", "worst", "rows"]), st.integers(1, 6)),
        max_size=12,
    ),
    padding=st.integers(0, 5),
)
def test_a_state_is_what_dictionaries_would_hold(
    deeds: list[tuple[str, int]], padding: int
) -> None:
    real = torch.ones(ROWS, 8, dtype=torch.bool)
    real[1, :padding] = False
    state = noted(fresh().extended(8, real if padding else None), 0)
    expected = contents(state)
    assert [len(row[0]) for row in expected] == [8, 8 - padding]
    for place, (deed, number) in enumerate(deeds):
        before = contents(state)
        if deed == "add":
            length = state.length
            state = state.extended(number, None)
            for heads in expected:
                for head in heads:
                    head.update(dict.fromkeys(range(length, length + number), 0.0))
        elif deed == "best":
            counts = [max(1, len(row[0]) - number - at) for at, row in enumerate(expected)]
            state = state.best(state.facts[..., 0] * 1.0, counts)
            expected = [
                [_best(head, count) for head in heads]
                for heads, count in zip(expected, counts, strict=True)
            ]
        elif deed == "worst" and state.real is None and state.columns > 1:
            state = state.without_worst(state.facts[..., 0])
            expected = [[_best(head, len(head) - 1) for head in heads] for heads in expected]
        elif deed == "rows":
            state = state.rows(torch.tensor([number % 2, 1]))
            expected = [[dict(head) for head in expected[row]] for row in (number % 2, 1)]
        else:
            continue
        found = contents(state)
        assert [[sorted(head.values()) for head in heads] for heads in found] == [
            [sorted(head.values()) for head in heads] for heads in expected
        ]
        if not _ties(before):
            assert found == expected
        state = noted(state, place + 1)
        expected = contents(state)


def _best(head: dict[int, float], count: int) -> dict[int, float]:
    return dict(sorted(head.items(), key=lambda item: -item[1])[:count])


def _ties(state: State) -> bool:
    return any(len(set(head.values())) < len(head) for heads in state for head in heads)


def test_those_of_a_row_come_first_and_the_rest_repeats_one_of_them() -> None:
    state = noted(fresh().extended(6, None), 3).best(torch.rand(ROWS, HEADS, 6), [5, 2])
    assert state.real is not None and state.real.tolist() == [[True] * 5, [True] * 2 + [False] * 3]
    assert state.index is not None
    assert (state.index[1, :, 2:] == state.index[1, :, :1]).all()


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("length", [5, 9, 11])
def test_going_back_fills_up_with_the_newest(padding: int, length: int) -> None:
    visible = torch.ones(ROWS, 12, dtype=torch.bool)
    visible[1, :padding] = False
    whole = noted(fresh().extended(12, visible if padding else None), 1)
    worth = whole.facts[..., 0].clone()
    state = whole.best(worth, [6, 5] if padding else [6])
    before = contents(state)
    after = contents(state.truncated(length, visible if padding else None))
    for row in range(ROWS):
        first = padding if row else 0
        wanted = min(len(before[row][0]), length - first)
        for head in range(HEADS):
            left = {at: fact for at, fact in before[row][head].items() if at < length}
            newest = [at for at in range(length - 1, first - 1, -1) if at not in left]
            left.update(dict.fromkeys(newest[: wanted - len(left)], 0.0))
            assert after[row][head] == left


def test_going_back_before_anything_was_evicted_keeps_what_is_known() -> None:
    state = noted(fresh().extended(9, None), 2)
    back = state.truncated(4, None)
    assert back.index is None and back.length == 4
    assert torch.equal(back.facts, state.facts[:, :, :4])


def test_an_earlier_state_stays_as_it_was() -> None:
    state = noted(fresh().extended(9, None), 2)
    facts = state.facts.clone()
    later = state.extended(2, None)
    later.facts.add_(1)
    later.without_worst(later.facts[..., 0]).facts.add_(1)
    state.truncated(3, None).best(torch.rand(ROWS, HEADS, 3), [2])
    assert torch.equal(state.facts, facts) and state.length == 9
