"""Which checkpoints stay, on their own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinigen_kv.rehearsal.checkpoints import KEPT, PART, TURN, Checkpoints


def noted(*lengths: int, rank: int = TURN) -> Checkpoints[int]:
    """Checkpoints whose state is their length."""
    checkpoints: Checkpoints[int] = Checkpoints()
    for length in lengths:
        checkpoints = checkpoints.noted(length, length, rank)
    return checkpoints


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from([PART, TURN])), max_size=30))
def test_few_stay_and_the_newest_two_always(steps: list[tuple[int, int]]) -> None:
    checkpoints: Checkpoints[int] = Checkpoints()
    lengths: list[int] = []
    for step, rank in steps:
        length = (lengths[-1] if lengths else 0) + step
        lengths.append(length)
        checkpoints = checkpoints.noted(length, length, rank)
        assert len(checkpoints.held) <= KEPT
        assert checkpoints.states == sorted(set(checkpoints.states))
        assert set(checkpoints.states) <= set(lengths)
        assert set(checkpoints.states) >= set(sorted(set(lengths))[-2:])


def test_the_end_of_a_long_prefix_outlasts_short_turns() -> None:
    checkpoints = noted(4000, *range(4100, 6000, 100))
    assert checkpoints.at(4000) == 4000


def test_those_within_a_prompt_go_first() -> None:
    checkpoints = noted(10)
    for length in range(500, 9000, 500):
        checkpoints = checkpoints.noted(length, length, PART)
    assert checkpoints.at(10) == 10
    assert checkpoints.noted(9000, 9000, TURN).at(10) == 10


def test_neighbours_of_a_length() -> None:
    checkpoints = noted(10, 20, 30)
    below, above = checkpoints.last_before(20), checkpoints.first_beyond(20)
    assert (below and below.state, checkpoints.at(20), above and above.state) == (10, 20, 30)
    assert checkpoints.at(15) is None
    assert checkpoints.last_before(10) is None and checkpoints.first_beyond(30) is None


def test_nothing_changes_in_place() -> None:
    before = noted(10, 20, 30)
    after = before.truncated(20)
    assert before.states == [10, 20, 30] and after.states == [10, 20]
    assert after.mapped(lambda state: -state).states == [-10, -20] and after.states == [10, 20]
