"""Partial keys as codes, against plain ones of the numbers that the codes stand for."""

from __future__ import annotations

from copy import copy

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fitting import DIM, HEADS, KV_HEADS, mixed, moments_of, random
from infinigen_kv.rehearsal.coded_partial_keys import CodedPartialKeys, coded_tokens
from infinigen_kv.rehearsal.codes import GROUP, CodeLayout, decode, encode
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.projection import Projection
from infinigen_kv.rehearsal.recent import MIN_WAITING

LAYOUT = CodeLayout(2, 1, 3)
RANK = LAYOUT.rank
NONE = torch.zeros(2, dtype=torch.bool)


def made(keys: Tensor, seed: int = 2) -> CodedPartialKeys:
    return CodedPartialKeys(keys, moments_of(*mixed(seed, 2, 60)).projection(RANK), LAYOUT)


def numbers_of(keys: Tensor, projection: Projection, coded: int) -> Tensor:
    """Partial keys ``(B, H_kv, T, R)``, the first ``coded`` of them as their codes have them."""
    partial = projection.partial_keys(keys).mT
    parts = [
        decode(*encode(partial[..., at : at + GROUP], LAYOUT), LAYOUT)
        for at in range(0, coded, GROUP)
    ]
    return torch.cat([*parts, partial[..., coded:]], dim=-1).mT


@pytest.mark.parametrize("tokens", [0, 1, 95, 96, 160, 300, 5000])
def test_full_groups_are_coded_and_the_newest_tokens_are_not(tokens: int) -> None:
    _, keys, _ = mixed(1, 2, tokens)
    coded = made(keys)
    assert coded.coded == max(0, (tokens - MIN_WAITING) // GROUP * GROUP) and coded.length == tokens
    wanted = numbers_of(keys, coded.projection, coded.coded)
    assert_close(coded.view(), wanted, atol=1e-5, rtol=1e-5)


def test_scores_and_sums_are_those_of_the_numbers() -> None:
    query, keys, _ = mixed(1, 2, 300)
    coded = made(keys)
    plain = PartialKeys(keys, coded.projection)
    plain.storage[..., :300] = coded.view().mT
    for softcap in (None, 3.0):
        for absolute in (False, True):
            found = coded.scores(query[:, :, -3:], 0.4, softcap, absolute=absolute)
            wanted = plain.scores(query[:, :, -3:], 0.4, softcap, absolute=absolute)
            assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    weights = random(5, 2, KV_HEADS, 4, 300)
    assert_close(coded.weighted(weights), plain.weighted(weights), atol=1e-4, rtol=1e-4)


def test_one_by_one_is_all_at_once() -> None:
    _, keys, _ = mixed(1, 2, 1000)
    grown = made(keys[:, :, :100])
    for token in range(100, 1000):
        grown.settle(token)
        assert grown.coded == coded_tokens(token)
        assert grown.storage.shape[3] == GROUP + MIN_WAITING
        grown.append(keys[:, :, token : token + 1])
    grown.settle(1000)
    whole = made(keys)
    # a product of many keys may round otherwise, and a number between two codes then fall apart
    assert ((grown.view() - whole.view()).abs() < 1e-4).float().mean() > 0.999


def test_what_is_held_costs_the_bytes_of_the_bits() -> None:
    _, keys, _ = mixed(1, 2, 4096 + MIN_WAITING)
    coded = made(keys)
    groups = coded.capacity // GROUP
    bits = 4 * LAYOUT.fours + 3 * LAYOUT.threes + 2 * LAYOUT.twos
    a_group = GROUP * bits // 8 + 2 * 2 * RANK
    assert coded.nbytes == 2 * KV_HEADS * (groups * a_group + (GROUP + MIN_WAITING) * RANK * 4)


def test_it_stays_as_it_is_for_as_many_tokens_as_it_says() -> None:
    _, keys, _ = mixed(1, 2, 400)
    coded = made(keys[:, :, :150])
    for length in range(150, 300):
        coded.settle(length)
        for more in (coded.steady_for(length) - 1, coded.steady_for(length)):
            other = copy(coded)
            other.append(keys[:, :, length : length + more])
            other.settle(length + more)
            assert (other.coded == coded.coded) is (more < coded.steady_for(length))
        coded.append(keys[:, :, length : length + 1])


def test_drafts_that_are_taken_back_leave_nothing() -> None:
    _, keys, _ = mixed(1, 2, 400)
    plain, drafted = made(keys[:, :, :200]), made(keys[:, :, :200])
    for token in range(200, 400):
        for each in (plain, drafted):
            each.settle(token)
        drafted.append(100 * keys[:, :, :MIN_WAITING])
        drafted.settle(token + MIN_WAITING)
        drafted.truncate(token)
        for each in (plain, drafted):
            each.append(keys[:, :, token : token + 1])
    assert plain.coded == 320 and drafted.coded == 384  # once drafts made them old enough
    mine, theirs = drafted.view(), plain.view()
    assert torch.equal(mine[:, :, :320], theirs[:, :, :320])
    assert torch.equal(mine[:, :, 384:], theirs[:, :, 384:])


@pytest.mark.parametrize("length", [0, 1, 63, 64, 100, 191, 192, 250, 300, 1000])
def test_tokens_of_a_group_that_is_cut_are_read_from_their_codes(length: int) -> None:
    _, keys, _ = mixed(1, 2, 300)
    coded = made(keys)
    before, other = coded.view(), copy(coded)
    coded.truncate(length)
    assert_close(coded.view(), before[:, :, :length])
    assert coded.coded % GROUP == 0 and coded.coded <= coded.length == min(length, 300)
    coded.append(keys[:, :, :200])
    coded.settle(coded.length)
    assert coded.view().shape[2] == min(length, 300) + 200
    assert torch.equal(other.view()[:, :, 256:], before[:, :, 256:])


def test_a_copy_reads_what_it_had() -> None:
    _, keys, _ = mixed(1, 2, 600)
    coded = made(keys[:, :, :150])
    other, before = copy(coded), coded.view()
    for token in range(150, 600):
        coded.settle(token)
        coded.append(keys[:, :, token : token + 1])
    assert torch.equal(other.view(), before)


def test_rows_are_taken_and_repeated() -> None:
    _, keys, _ = mixed(1, 2, 300)
    coded = made(keys)
    before = coded.view()
    coded.take_rows(torch.tensor([1, 0, 1]))
    assert torch.equal(coded.view(), before[[1, 0, 1]])
    coded.append(torch.cat([keys, keys[:1]])[:, :, :1])
    assert coded.length == 301


def test_rows_are_kept_of_the_old_ones() -> None:
    _, keys, _ = mixed(1, 2, 300)
    _, others, _ = mixed(8, 2, 310)
    old = made(keys)
    new = CodedPartialKeys(others, old.projection, LAYOUT)
    before = new.view()
    new.keep_rows(torch.tensor([True, False]), old)
    assert torch.equal(new.view()[0, :, :256], old.view()[0, :, :256])
    assert torch.equal(new.view()[0, :, 256:300], old.view()[0, :, 256:300])
    assert torch.equal(new.view()[1], before[1])
    assert torch.equal(new.view()[0, :, 300:], before[0, :, 300:])


def test_fitting_anew_reads_the_same_codes_by_least_squares() -> None:
    query, keys, values = mixed(1, 2, 300)
    coded = made(keys)
    found = coded.refitted(moments_of(query, keys, values), NONE)
    assert found.codes is coded.codes and found.storage is coded.storage
    scores = found.scores(query[:, :, :1], 1.0, None, absolute=True)[:, :, :, 0]
    for row in range(2):
        for head in range(KV_HEADS):
            key = keys[row, head].double().numpy()
            assert coded.projection.offset is not None
            offset = coded.projection.offset[row, head].double().numpy()
            z = (key - offset) @ coded.projection.key[row, head].double().numpy()
            known = np.hstack([z, np.ones((len(z), 1))])
            line = np.linalg.lstsq(known, key, rcond=None)[0]
            read = np.hstack([coded.view()[row, head].double().numpy(), known[:, -1:]])
            guessed = read @ line
            group = slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
            wanted = query[row, group, 0].double().numpy() @ guessed.T
            error = np.abs(scores[row, head].double().numpy() - wanted).max()
            assert error < 2e-3 * np.abs(wanted).max()


def test_fitting_anew_changes_nothing_where_nothing_is_new() -> None:
    """Of full rank the key is known, whatever it was fitted to."""
    query, keys, values = mixed(1, 2, 300)
    moments = moments_of(query, keys, values)
    layout = CodeLayout(DIM, 0, 0)
    coded = CodedPartialKeys(keys, moments_of(*mixed(2, 2, 60)).projection(DIM), layout)
    before = coded.scores(query[:, :, :1], 1.0, None, absolute=True)
    after = coded.refitted(moments, NONE).scores(query[:, :, :1], 1.0, None, absolute=True)
    assert (after - before).abs().max() < 1e-2 * before.abs().max()


def test_rows_that_are_not_due_are_read_as_before() -> None:
    query, keys, values = mixed(1, 2, 300)
    coded = made(keys)
    keep = torch.tensor([True, False])
    found = coded.refitted(moments_of(query, keys, values), keep)
    again = found.refitted(moments_of(query, keys, values), ~keep)
    scores = [
        each.scores(query[:, :, :1], 1.0, None, absolute=True) for each in (coded, found, again)
    ]
    assert_close(scores[1][0], scores[0][0], atol=1e-5, rtol=1e-5)
    assert not torch.equal(scores[1][1], scores[0][1])
    assert_close(scores[2][1], scores[1][1], atol=1e-5, rtol=1e-5)
    assert not torch.equal(scores[2][0], scores[1][0])
