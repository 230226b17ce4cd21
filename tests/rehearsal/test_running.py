"""Sums that are taken back, against sums over the tokens that are left, and nothing else."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fitting import DIM, KV_HEADS, mixed, random
from infinigen_kv.rehearsal.checkpoints import KEPT, TURN
from infinigen_kv.rehearsal.recent import MAX_WAITING, MIN_WAITING, SeenTokens
from infinigen_kv.rehearsal.running import RunningStatistics
from infinigen_kv.rehearsal.skew import skew_matrix
from infinigen_kv.rehearsal.statistics import Magnitudes, Moments, PromptStatistics

ROWS, PADDING = 2, (0, 7)
LONGEST = 700
SKEW = skew_matrix((sample := random(9, KV_HEADS, 50, DIM)).mT @ sample)
KINDS = ("moments", "magnitudes")
# sums of some hundred float32 numbers, in another order
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-3}


def empty(kind: str, keys: Tensor, values: Tensor) -> PromptStatistics:
    return Moments.start(keys, values) if kind == "moments" else Magnitudes.start(keys, SKEW)


class Text:
    """Tokens of one layer, the first ones of the second row padding."""

    def __init__(self, seed: int) -> None:
        self.query, self.keys, self.values = mixed(seed, ROWS, LONGEST)
        self.real = (torch.arange(LONGEST) >= torch.tensor(PADDING)[:, None]).float()
        self.position = (self.real.cumsum(1) - self.real).long()

    def continued(self, length: int, other: Text) -> Text:
        """The first ``length`` tokens, and then the other text's."""
        made = Text.__new__(Text)
        made.real, made.position = self.real, self.position
        for name in ("query", "keys", "values"):
            parts = getattr(self, name)[:, :, :length], getattr(other, name)[:, :, length:]
            setattr(made, name, torch.cat(parts, dim=2))
        return made

    def seen(self, start: int, end: int, *, turn: bool) -> SeenTokens:
        part = slice(start, end)
        rank = TURN if turn else None
        return SeenTokens(
            self.query[:, :, part], self.keys[:, :, part], self.values[:, :, part],
            self.position[:, part], self.real[:, part], start, rank, rank,
        )  # fmt: skip

    def sums(self, kind: str, length: int) -> PromptStatistics:
        """Of the first ``length`` tokens, at once."""
        found = empty(kind, self.keys, self.values)
        part = slice(0, length)
        found.observe(
            self.query[:, :, part], self.keys[:, :, part], self.position[:, part],
            self.real[:, part], self.values[:, :, part],
        )  # fmt: skip
        return found

    def complete(self, running: RunningStatistics) -> None:
        running.complete(self.keys, self.values, self.real.bool())


def check(found: PromptStatistics, wanted: PromptStatistics, *, queries: bool = True) -> None:
    """The same sums, whatever they are about."""
    if queries:
        assert_close(found.query_sums, wanted.query_sums, **CLOSE)
    if isinstance(wanted, Magnitudes):
        assert isinstance(found, Magnitudes)
        assert_close(found.key_sum, wanted.key_sum, **CLOSE)
        return
    assert isinstance(found, Moments) and isinstance(wanted, Moments)
    assert_close(found.count, wanted.count)
    assert_close(found.key_mean, wanted.key_mean, **CLOSE)
    assert_close(found.key_scatter, wanted.key_scatter, rtol=1e-3, atol=1e-1)
    assert found.values is not None and wanted.values is not None
    means = [
        sums.shift + sums.total / found.count.clamp_min(1) for sums in (found.values, wanted.values)
    ]
    assert_close(means[0], means[1], **CLOSE)


def begun(kind: str) -> RunningStatistics:
    return RunningStatistics(partial(empty, kind))


def steps(running: RunningStatistics, text: Text, start: int, end: int) -> None:
    for at in range(start, end):
        running.add(text.seen(at, at + 1, turn=False))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("decoded", [0, 20, 200])
@pytest.mark.parametrize("prefix", [20, 100, 300])
def test_a_turn_that_is_taken_back(kind: str, rounds: int, decoded: int, prefix: int) -> None:
    text, running = Text(0), begun(kind)
    running.add(text.seen(0, prefix, turn=True))
    for number in range(rounds):
        other = Text(number + 1)
        running.add(other.seen(prefix, prefix + 150, turn=True))
        steps(running, other, prefix + 150, prefix + 150 + decoded)
        running.truncate(prefix)
    running.add(text.seen(prefix, prefix + 90, turn=True))
    steps(running, text, prefix + 90, prefix + 120)
    text.complete(running)
    check(running.total(), text.sums(kind, prefix + 120))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("taken", [1, MIN_WAITING])
@pytest.mark.parametrize("decoded", [0, 1, 40, 63, 64, 65, 150])
def test_the_newest_tokens_leave_no_trace(kind: str, taken: int, decoded: int) -> None:
    text, running = Text(0), begun(kind)
    running.add(text.seen(0, 200, turn=True))
    steps(running, text, 200, 200 + decoded)
    running.truncate(200 + decoded - taken)
    assert running.missing == 0
    check(running.total(), text.sums(kind, 200 + decoded - taken))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafted", [5, 33, MAX_WAITING])
@pytest.mark.parametrize("kept", [0, 3])
def test_drafts_that_are_rejected(kind: str, drafted: int, kept: int) -> None:
    text, running, at = Text(0), begun(kind), 100
    running.add(text.seen(0, at, turn=True))
    for seed in range(8):
        mixed_text = text.continued(at + kept, Text(seed + 1))
        running.add(mixed_text.seen(at, at + drafted, turn=False))
        at += kept
        running.truncate(at)
        assert running.missing == 0
        running.add(text.seen(at, at + 1, turn=False))
        at += 1
    check(running.total(), text.sums(kind, at))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 8, 150, 512, 530, 640])
def test_anywhere_in_a_prompt(kind: str, length: int) -> None:
    """Keys and values exactly; queries too where they are all alike, whose weights are known."""
    text, running = Text(0), begun(kind)
    text.query = text.query[:, :, :1].expand_as(text.query).contiguous()
    running.add(text.seen(0, LONGEST, turn=True))
    running.truncate(length)
    text.complete(running)
    check(running.total(), text.sums(kind, length))


def test_queries_between_checkpoints_are_guessed_from_both_sides() -> None:
    """Better than what knows nothing of either: those of the checkpoint, or all of them."""
    text, running = Text(0), begun("moments")
    running.add(text.seen(0, 300, turn=True))
    running.add(text.seen(300, 600, turn=True))
    running.truncate(450)
    text.complete(running)
    wanted = text.sums("moments", 450).query_sums
    error = (running.total().query_sums - wanted).norm()
    for length in (300, 600):
        assert error < (text.sums("moments", length).query_sums - wanted).norm() / 3


@settings(max_examples=40, deadline=None)
@given(
    deeds=st.lists(
        st.one_of(
            st.tuples(st.just("turn"), st.sampled_from([1, 5, 40, 65, 130])),
            st.tuples(st.just("steps"), st.sampled_from([1, 30, 70])),
            st.tuples(st.just("crop"), st.integers(1, 300)),
            st.tuples(st.just("copy"), st.just(0)),
        ),
        max_size=10,
    )
)
def test_keys_and_values_are_right_whatever_happens(deeds: list[tuple[str, int]]) -> None:
    text, running, at = Text(0), begun("moments"), 20
    running.add(text.seen(0, at, turn=True))
    copies = []
    for seed, (deed, number) in enumerate(deeds):
        if deed == "crop":
            at = max(1, at - number)
            running.truncate(at)
        elif deed == "copy":
            copies.append((running.__copy__(), text, at))
        elif at + number <= LONGEST:
            text = text.continued(at, Text(seed + 1))
            if deed == "turn":
                running.add(text.seen(at, at + number, turn=True))
            else:
                steps(running, text, at, at + number)
            at += number
        assert len(running._checkpoints.held) <= KEPT
    for each, its_text, length in [*copies, (running, text, at)]:
        its_text.complete(each)
        check(each.total(), its_text.sums("moments", length), queries=False)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_take_their_history_along(kind: str) -> None:
    text, other, running, index = Text(0), Text(1), begun(kind), torch.tensor([1, 1, 0])
    running.add(text.seen(0, 150, turn=True))
    running.add(other.seen(150, 300, turn=True))
    steps(running, other, 300, 380)
    running.take_rows(index)
    running.truncate(150)
    running.complete(text.keys[index], text.values[index], text.real[index].bool())
    check(running.total(), text.sums(kind, 150).rows(index))
