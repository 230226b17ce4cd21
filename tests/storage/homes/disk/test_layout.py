"""Where tokens lie in the file, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinigen_kv.storage.homes.disk.layout import BLOCK, Layout, entries_at

SIZES = [24, 100, 256, 768, 1056, 1400, 2048, 2112, 3000, 3072, 4096, 4224, 8192, 40000]


@pytest.mark.parametrize(
    ("token_bytes", "blocks", "tokens"),
    [(256, 1, 16), (768, 1, 5), (2112, 2, 3), (4096, 1, 1), (8192, 2, 1), (24, 1, 170)],
)
def test_groups_of_common_sizes(token_bytes: int, blocks: int, tokens: int) -> None:
    layout = Layout.of(token_bytes)
    assert (layout.blocks, layout.group_tokens) == (blocks, tokens)


@given(token_bytes=st.integers(1, 60000))
def test_a_group_wastes_at_most_a_quarter(token_bytes: int) -> None:
    layout = Layout.of(token_bytes)
    assert layout.group_tokens >= 1
    assert layout.group_tokens * token_bytes >= 0.75 * layout.group_bytes
    assert layout.extent_bytes % BLOCK == 0


@pytest.mark.parametrize("token_bytes", SIZES)
def test_addresses_follow_the_groups(token_bytes: int) -> None:
    layout = Layout.of(token_bytes)
    extents = np.array([[0, 5], [2, 1]]) * layout.extent_bytes
    count = layout.extent_tokens + 2 * layout.group_tokens
    for row in range(2):
        tokens = np.arange(count)
        found = layout.addresses(extents, np.full(count, row), tokens)
        for token in {0, 1, layout.group_tokens, layout.extent_tokens - 1, count - 1}:
            extent, inside = divmod(token, layout.extent_tokens)
            group, place = divmod(inside, layout.group_tokens)
            start = extents[row, extent] + group * layout.group_bytes + place * token_bytes
            assert found[token] == start
        assert (np.diff(np.sort(found)) >= token_bytes).all()


@pytest.mark.parametrize("token_bytes", SIZES)
def test_tokens_of_groups_share_memory(token_bytes: int) -> None:
    layout = Layout.of(token_bytes)
    groups = np.zeros((2, 3, layout.group_bytes), dtype=np.uint8)
    tokens = layout.tokens(groups)
    assert tokens.shape == (2, 3, layout.group_tokens, token_bytes)
    assert np.shares_memory(tokens, groups)
    tokens[1, 2, 0, 0] = 7
    assert groups[1, 2, 0] == 7


def test_spans_end_with_their_extent() -> None:
    layout = Layout.of(4096)
    extents = np.array([7, 3]) * layout.extent_bytes
    per_extent = layout.extent_groups
    spans = list(layout.spans(extents, per_extent - 2, 5))
    assert spans == [
        (7 * layout.extent_bytes + (per_extent - 2) * BLOCK, per_extent - 2, 2),
        (3 * layout.extent_bytes, per_extent, 3),
    ]
    assert list(layout.spans(extents, 4, 0)) == []


@settings(max_examples=60, deadline=None)
@given(
    token_bytes=st.sampled_from(SIZES[:-1]),
    wanted=st.lists(st.integers(0, 300), max_size=40),
    gap=st.integers(0, 5),
    swapped=st.booleans(),
)
def test_runs_hold_the_tokens_and_as_few_blocks_as_allowed(
    token_bytes: int, wanted: list[int], gap: int, swapped: bool
) -> None:
    layout = Layout.of(token_bytes)
    extents = np.arange(400 // layout.extent_tokens + 1)
    extents = (extents[::-1] if swapped else extents)[None] * layout.extent_bytes
    tokens = np.array(wanted, dtype=np.int64)
    addresses = layout.addresses(extents, np.zeros(1, dtype=np.int64), tokens)
    runs = layout.coalesce(addresses, gap)

    file = np.random.default_rng(0).integers(0, 256, extents.size * layout.extent_bytes, np.uint8)
    buffer = np.zeros(runs.sizes.sum(), dtype=np.uint8)
    pieces = list(runs.pieces(longest=3 * BLOCK))
    for offset, size, start in pieces:
        assert offset % BLOCK == size % BLOCK == start % BLOCK == 0
        assert 0 < size <= 3 * BLOCK
        buffer[start : start + size] = file[offset : offset + size]
    assert sum(size for _, size, _ in pieces) == len(buffer)
    found = entries_at(buffer, runs.places, token_bytes)
    for place, address in enumerate(addresses.tolist()):
        assert np.array_equal(found[place], file[address : address + token_bytes])

    blocks: list[list[int]] = []  # runs, block by block
    for address in sorted(addresses.tolist()):
        own = range(address // BLOCK, (address + token_bytes - 1) // BLOCK + 1)
        if not blocks or own[0] - blocks[-1][-1] > gap + 1:
            blocks.append([own[0]])
        blocks[-1].extend(range(blocks[-1][-1] + 1, own[-1] + 1))
    assert runs.offsets.tolist() == [run[0] * BLOCK for run in blocks]
    assert runs.sizes.tolist() == [len(run) * BLOCK for run in blocks]
