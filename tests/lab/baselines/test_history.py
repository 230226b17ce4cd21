"""Bits of the last queries against lists of booleans."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinigen_kv_lab.baselines.history import WORD, ones, push, words_for


@settings(max_examples=60)
@given(
    queries=st.integers(1, 3 * WORD),
    pushes=st.lists(st.integers(1, 2 * WORD + 3), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_push_and_count(queries: int, pushes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = 5
    words = torch.zeros(2, tokens, words_for(queries), dtype=torch.long)
    seen = torch.zeros(2, 0, tokens, dtype=torch.bool)
    for count in pushes:
        bits = torch.rand(2, count, tokens, generator=generator) < 0.5
        before = words.clone()
        pushed = push(words, bits, queries)
        assert torch.equal(words, before), "written to"
        words = pushed
        seen = torch.cat([seen, bits], dim=1)
        assert torch.equal(ones(words), seen[:, -queries:].sum(dim=1))


def test_one_by_one_is_all_at_once() -> None:
    bits = torch.rand(3, 200, 7, generator=torch.Generator().manual_seed(1)) < 0.3
    words = torch.zeros(3, 7, words_for(150), dtype=torch.long)
    together = push(words, bits, 150)
    for each in bits.split(1, dim=1):
        words = push(words, each, 150)
    assert torch.equal(words, together)
    assert int(together.min()) >= 0
