"""Tokens that wait for the running sums, against sums over all at once."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from fitting import mixed
from infinigen_kv.rehearsal.recent import DecodedTokens, RecentTokens
from infinigen_kv.rehearsal.statistics import Moments


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("dropped", [0, 3, 5, 100])
def test_tokens_that_waited_count_as_at_once(dropped: int, width: int) -> None:
    query, keys, values = mixed(3, 2, 10)
    weight = torch.ones(2, 10)
    weight[1, 4] = 0.0
    recent, found = RecentTokens(), Moments.start(keys, values)
    for at in range(0, 10, width):
        some = slice(at, min(at + width, 10))
        shown = None if bool(weight[:, some].all()) else weight[:, some]
        recent.add(
            DecodedTokens(
                query[:, :, some],
                keys[:, :, some],
                values[:, :, some],
                torch.arange(10)[None, some],
                shown,
            )
        )
    recent.drop(dropped)
    recent.rows(torch.tensor([1, 0])).move_into(found)
    left = max(0, 10 - dropped)
    wanted = Moments.start(keys, values)
    if left:
        position = torch.arange(left)[None]
        part = slice(0, left)
        wanted.observe(
            query.flip(0)[:, :, part], keys.flip(0)[:, :, part], position, weight.flip(0)[:, part],
            values.flip(0)[:, :, part],
        )  # fmt: skip
    assert_close(found.query_outer, wanted.query_outer)
    assert_close(found.key_scatter, wanted.key_scatter, atol=1e-4, rtol=1e-4)
    assert found.values is not None and wanted.values is not None
    assert_close(found.values.products, wanted.values.products, atol=1e-4, rtol=1e-4)
    assert_close(found.count, wanted.count)
