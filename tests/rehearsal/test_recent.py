"""Tokens that wait for the running sums, against sums over all at once."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from fitting import mixed
from infinigen_kv.rehearsal.checkpoints import TURN
from infinigen_kv.rehearsal.recent import RecentTokens, SeenTokens
from infinigen_kv.rehearsal.statistics import Moments


def waiting(width: int, turn: slice = slice(0, 0)) -> tuple[RecentTokens, SeenTokens]:
    """Ten tokens, in forwards of ``width``, of which that at ``turn`` is a turn; and all at once.

    The second row's fifth is padding.
    """
    query, keys, values = mixed(3, 2, 10)
    weight = torch.ones(2, 10)
    weight[1, 4] = 0.0
    whole = SeenTokens(query, keys, values, torch.arange(10)[None], weight, 0)
    recent = RecentTokens()
    for at in range(0, 10, width):
        part = whole.part(slice(at, min(at + width, 10)))
        assert part.weight is not None
        rank = TURN if at in range(turn.start, turn.stop) else None
        shown = None if bool(part.weight.all()) else part.weight
        recent.add(
            SeenTokens(
                part.query, part.key, part.value, part.position, shown, part.start, rank, rank
            )
        )
    return recent, whole


def sums(*runs: SeenTokens) -> Moments:
    found = Moments.start(runs[0].key, runs[0].value)
    for run in runs:
        found.observe(run.query, run.key, run.position, run.weight, run.value)
    return found


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("dropped", [0, 3, 5, 100])
@pytest.mark.parametrize("taken", [0, 2, 5])
def test_tokens_that_waited_count_as_at_once(dropped: int, width: int, taken: int) -> None:
    recent, whole = waiting(width)
    left = max(0, 10 - dropped)
    recent.truncate(left)
    assert recent.tokens == left
    index = torch.tensor([1, 0])
    recent = recent.rows(index)
    runs = [*recent.take(taken), *recent.runs()]
    assert recent.tokens == max(0, left - taken)
    assert [run.start for run in runs] == sorted({0, min(taken, left)} - {left})
    if left == 0:
        return
    found, wanted = sums(*runs), sums(whole.rows(index).first(left))
    assert_close(found.query_outer, wanted.query_outer)
    assert_close(found.key_scatter, wanted.key_scatter, atol=1e-4, rtol=1e-4)
    assert_close(found.key_mean, wanted.key_mean, atol=1e-4, rtol=1e-4)
    assert_close(found.count, wanted.count)


def test_runs_end_where_a_turn_does() -> None:
    recent, _ = waiting(2, turn=slice(4, 6))
    runs = recent.runs()
    assert [(run.start, run.end) for run in runs] == [(0, 4), (4, 6), (6, 10)]
    assert [run.begins for run in runs] == [run.ends for run in runs] == [None, TURN, None]


def test_half_a_turn_begins_but_does_not_end() -> None:
    recent, _ = waiting(5, turn=slice(0, 10))
    (first,) = recent.take(3)
    assert (first.begins, first.ends, first.end) == (TURN, None, 3)
    recent.truncate(7)
    assert [(run.begins, run.ends) for run in recent.runs()] == [(None, TURN), (TURN, None)]
