"""The token buffer against a list of tensors per row."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from infinigen_kv.storage.homes.buffer import SMALLEST, TokenBuffer

HEADS, WIDTH = 2, 3


def buffer(rows: int = 2, capacity: int = 0, dtype: torch.dtype = torch.float32) -> TokenBuffer:
    return TokenBuffer(
        rows, HEADS, WIDTH, dtype=dtype, device=torch.device("cpu"), capacity=capacity
    )


def tokens(rows: int, count: int, first: int = 0) -> Tensor:
    """``(rows, HEADS, count, WIDTH)``, every number another one."""
    size = rows * HEADS * count * WIDTH
    return torch.arange(first, first + size).view(rows, HEADS, count, WIDTH).float()


class BufferMachine(RuleBasedStateMachine):
    """Random operations on a buffer and on ``rows``: a list of ``(HEADS, WIDTH)`` for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = buffer(rows=2)
        self.rows: list[list[Tensor]] = [[], []]
        self.written = 0

    # Sizes around SMALLEST, so that the buffer grows.
    @rule(count=st.sampled_from([0, 1, 1, 2, 5, 100, SMALLEST - 1, SMALLEST, SMALLEST + 1]))
    def extend(self, count: int) -> None:
        new = tokens(len(self.rows), count, self.written)
        self.written += new.numel()
        place = self.buffer.extend(count)
        assert place.shape == new.shape
        place.copy_(new)
        for row, content in enumerate(self.rows):
            content.extend(new[row].unbind(1))

    @rule(length=st.integers(-3, 700))
    def truncate(self, length: int) -> None:
        self.buffer.truncate(length)
        for content in self.rows:
            del content[max(0, length) :]

    @rule(data=st.data())
    def take_rows(self, data: st.DataObject) -> None:
        places = st.integers(0, len(self.rows) - 1)
        index = data.draw(st.lists(places, min_size=1, max_size=3))
        self.buffer.take_rows(torch.tensor(index))
        self.rows = [list(self.rows[place]) for place in index]

    @rule(tokens=st.integers(0, 1000))
    def reserve(self, tokens: int) -> None:
        self.buffer.reserve(tokens)
        assert self.buffer.capacity >= tokens

    @precondition(lambda self: len(self.rows[0]) > 0)
    @rule(count=st.integers(0, 4), seed=st.integers(0, 99), transposed=st.booleans())
    def gather(self, count: int, seed: int, transposed: bool) -> None:
        length = len(self.rows[0])
        generator = torch.Generator().manual_seed(seed)
        shape = len(self.rows), HEADS, count
        index = torch.randint(0, length, shape, generator=generator)
        given = index.mT.contiguous().mT if transposed else index  # any memory layout
        found = self.buffer.gather(given)
        assert found.shape == (*shape, WIDTH)
        for row, content in enumerate(self.rows):
            for head in range(HEADS):
                for place, token in enumerate(index[row, head].tolist()):
                    assert torch.equal(found[row, head, place], content[token][head])

    @invariant()
    def content_is_the_same(self) -> None:
        length = len(self.rows[0])
        assert self.buffer.rows == len(self.rows)
        assert self.buffer.length == length <= self.buffer.capacity
        view = self.buffer.view()
        assert view.shape == (len(self.rows), HEADS, length, WIDTH)
        for row, content in enumerate(self.rows):
            if content:
                assert torch.equal(view[row], torch.stack(content, dim=1))


BufferMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestBuffer = BufferMachine.TestCase


def test_views_share_memory() -> None:
    pool = buffer()
    pool.extend(3).copy_(tokens(2, 3))
    view = pool.view()
    pool.extend(1).fill_(7.0)
    view[0, 0, 0] = -1.0
    assert pool.view()[0, 0, 0].tolist() == [-1.0] * WIDTH
    assert pool.view().data_ptr() == view.data_ptr()


def test_a_reserved_buffer_never_moves() -> None:
    pool = buffer(capacity=1000)
    assert pool.capacity == 1000
    place = pool.extend(1).data_ptr()
    for count in (299, 1, 600, 99):
        pool.extend(count).fill_(1.0)
    assert pool.view().data_ptr() == place


def test_growth_is_geometric_so_that_a_step_costs_no_copy_of_the_whole() -> None:
    pool = buffer(rows=1)
    pool.extend(1)
    place, moves = pool.view().data_ptr(), 0
    for _ in range(8 * SMALLEST - 1):
        pool.extend(1)
        moves += pool.view().data_ptr() != place
        place = pool.view().data_ptr()
    assert moves <= 6  # 1.5 ** 6 > 8
    assert pool.capacity <= 1.5 * 8 * SMALLEST


def test_bytes_are_those_reserved() -> None:
    pool = buffer(rows=3, capacity=500, dtype=torch.bfloat16)
    assert pool.nbytes == 3 * HEADS * 500 * WIDTH * 2
    pool.extend(10)
    assert pool.nbytes == 3 * HEADS * 500 * WIDTH * 2
    assert pool.view().dtype == torch.bfloat16


def test_taking_rows_copies_them() -> None:
    pool = buffer()
    pool.extend(2).copy_(tokens(2, 2))
    pool.take_rows(torch.tensor([1, 1]))
    pool.view()[0].fill_(-1.0)
    assert torch.equal(pool.view()[1], tokens(2, 2)[1])


def test_gathering_nothing_gives_nothing() -> None:
    pool = buffer()
    pool.extend(2).copy_(tokens(2, 2))
    assert pool.gather(torch.zeros(2, HEADS, 0, dtype=torch.long)).shape == (2, HEADS, 0, WIDTH)
