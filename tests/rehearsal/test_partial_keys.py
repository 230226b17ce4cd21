"""Partial keys in a new basis, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fitting import DIM, HEADS, KV_HEADS, mixed, moments_of, random
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.statistics import Moments, Projection

RANK = 3


def recoded(partial: PartialKeys, new: Projection, moments: Moments, keep: Tensor) -> PartialKeys:
    return partial.recoded(new, moments, partial.guesses(moments), keep)


@pytest.mark.parametrize("tokens_held", [70, 5000])  # more than are turned at once
def test_partial_keys_are_turned_by_least_squares(tokens_held: int) -> None:
    query, keys, values = mixed(1, 2, tokens_held)
    old = moments_of(*mixed(2, 2, 60)).projection(RANK)
    moments = moments_of(query, keys, values)
    new = moments.projection(RANK)
    found = recoded(PartialKeys(keys, old), new, moments, torch.zeros(2, dtype=torch.bool))
    assert found.length == tokens_held and found.projection is new
    for row in range(2):
        for head in range(KV_HEADS):
            key = keys[row, head].double().numpy()
            assert old.offset is not None and new.offset is not None
            offset, to_partial = (
                each[row, head].double().numpy() for each in (old.offset, old.key)
            )
            z = (key - offset) @ to_partial
            known = np.hstack([z, np.ones((len(z), 1))])
            guess = known @ np.linalg.lstsq(known, key, rcond=None)[0]
            wanted = (guess - new.offset[row, head].numpy()) @ new.key[row, head].double().numpy()
            error = np.abs(found.view()[row, head].numpy() - wanted).max()
            assert error < 1e-3 * np.abs(wanted).max()


def test_of_full_rank_nothing_is_lost() -> None:
    query, keys, values = mixed(1, 1, 70)
    moments = moments_of(query, keys, values)
    old, new = moments_of(*mixed(2, 1, 60)).projection(DIM), moments.projection(DIM)
    found = recoded(PartialKeys(keys, old), new, moments, torch.zeros(1, dtype=torch.bool))
    wanted = PartialKeys(keys, new).view()
    assert (found.view() - wanted).abs().max() < 1e-2 * wanted.abs().max()


def test_rows_that_are_kept_keep_their_partial_keys() -> None:
    query, keys, values = mixed(1, 2, 30)
    moments = moments_of(query, keys, values)
    partial = PartialKeys(keys, moments_of(*mixed(2, 2, 60)).projection(RANK))
    before = partial.view().clone()
    keep = torch.tensor([True, False])
    new = moments.projection(RANK).with_rows(keep, partial.projection)
    found = recoded(partial, new, moments, keep)
    assert torch.equal(found.view()[0], before[0])
    assert not torch.equal(found.view()[1], before[1])
    assert torch.equal(partial.view(), before)  # the old ones are still there for copies of a cache


def test_keys_that_do_not_vary_give_finite_numbers() -> None:
    query, _, values = mixed(1, 1, 30)
    keys = random(5, 1, KV_HEADS, 1, DIM).expand(-1, -1, 30, -1)
    moments = moments_of(query, keys, values)
    partial = PartialKeys(keys, moments.projection(RANK))
    again = recoded(partial, moments.projection(RANK), moments, torch.zeros(1, dtype=torch.bool))
    assert bool(again.view().isfinite().all())


def test_keys_of_few_directions_are_turned_again_and_again() -> None:
    """With fewer directions than R, rounding errors must not grow from turn to turn."""
    start, step, total, rank, dim = 100, 20, 700, 16, 32
    query = random(1, 1, HEADS, total, dim)
    keys = random(2, 1, KV_HEADS, total, 3) @ random(3, 3, dim)
    moments = Moments.start(keys)
    moments.observe(query[:, :, :start], keys[:, :, :start], torch.arange(start)[None], None)
    partial = PartialKeys(keys[:, :, :start], moments.projection(rank))
    for at in range(start, total, step):
        part = slice(at, at + step)
        new_keys = keys[:, :, part]
        moments.observe(query[:, :, part], new_keys, torch.arange(at, at + step)[None], None)
        partial.append(new_keys)
        partial = partial.refitted(moments, torch.zeros(1, dtype=torch.bool))
    found = partial.scores(query[:, :, -1:], 1.0, None)
    wanted = PartialKeys(keys, partial.projection).scores(query[:, :, -1:], 1.0, None)
    assert_close(found, wanted, atol=1e-3, rtol=1e-3)
