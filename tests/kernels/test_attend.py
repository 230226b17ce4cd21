"""Compiled attention over entries against a float64 loop, and partial keys against `Projection`."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from infinigen_kv.attention.entries import Entries
from infinigen_kv.kernels.base import Kernels
from infinigen_kv.kernels.native.arrays import as_flat
from infinigen_kv.kernels.native.kernels import NativeKernels
from infinigen_kv.kernels.reference import TorchKernels
from infinigen_kv.rehearsal.partial_keys import SPARE_TOKENS, PartialKeys
from infinigen_kv.rehearsal.statistics import Projection

SCALING = 0.3
DTYPES = [torch.float32, torch.bfloat16]
KERNELS = [NativeKernels, TorchKernels]
Layout = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Drawn:
    """Random tensors of one dtype."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype

    def numbers(self, *shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self._generator) * size).to(self._dtype)

    def below(self, most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=self._generator)


def naive(
    query: Tensor,
    entries: Entries,
    counts: list[int],
    keys: Tensor,
    values: Tensor,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Output ``(B, 1, H, D_v)`` and group sums of weights ``(B, H_kv, n + 1)``, float64."""
    rows, heads = query.shape[:2]
    kv_heads = keys.shape[1]
    columns = entries.keys.shape[2] if entries.places is None else entries.places.shape[2]
    output = torch.zeros(rows, 1, heads, values.shape[3], dtype=torch.float64)
    sums = torch.zeros(rows, kv_heads, columns + 1, dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            shared = head // (heads // kv_heads)
            places = list(range(columns))
            if entries.places is not None:
                places = entries.places[row, shared].tolist()
            seen = [entries.keys[row, shared, place] for place in places[: counts[row]]]
            mixed = [entries.values[row, shared, place] for place in places[: counts[row]]]
            seen.append(keys[row, shared, 0])
            mixed.append(values[row, shared, 0])
            asked = query[row, head, 0].double().detach()
            scores = [SCALING * float(asked @ key.double().detach()) for key in seen]
            if softcap is not None:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            shares = torch.tensor(scores, dtype=torch.float64).softmax(0)
            output[row, 0, head] = shares @ torch.stack(mixed).double()
            sums[row, shared, : counts[row]] += shares[:-1]
            sums[row, shared, columns] += shares[-1]
    return output, sums


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Float32 sums, rounded once to the dtype."""
    assert found.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), expected, atol=3e-6, rtol=rtol)


# Where entries lie.


def contiguous(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return keys.contiguous(), values.contiguous()


def side_by_side(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """As a codec that keeps the bytes returns them: one buffer of keys beside values."""
    widths = keys.shape[3], values.shape[3]
    return torch.cat([keys, values], dim=3).split(widths, dim=3)


def with_room(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """As in a buffer with places that are not in use."""
    return _with_room(keys, 5), _with_room(values, 5)


def with_unequal_room(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return _with_room(keys, 5), _with_room(values, 2)


def _with_room(vectors: Tensor, room: int) -> Tensor:
    rows, heads, count, width = vectors.shape
    buffer = vectors.new_full((rows, heads, count + room, width), math.nan)
    buffer[:, :, :count] = vectors
    return buffer[:, :, :count]


def heads_inside(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """As a model's projection gives them: all heads of a token, then the next token."""
    return tuple(  # type: ignore[return-value]
        each.transpose(1, 2).contiguous().transpose(1, 2) for each in (keys, values)
    )


def only_values_inside(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return keys.contiguous(), heads_inside(keys, values)[1]


def numbers_apart(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(each.mT.contiguous().mT for each in (keys, values))  # type: ignore[return-value]


def with_gaps(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Every second vector, and rows further apart than their heads."""
    made = []
    for each in (keys, values):
        rows, heads, count, width = each.shape
        wide = each.new_full((rows, heads + 1, 2 * count, width), math.nan)
        wide[:, :heads, ::2] = each
        made.append(wide[:, :heads, ::2])
    return made[0], made[1]


LAYOUTS: list[Layout] = [
    contiguous,
    side_by_side,
    with_room,
    with_unequal_room,
    heads_inside,
    only_values_inside,
    numbers_apart,
    with_gaps,
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_flat_memory_is_addressed_as_the_tensor_is(layout: Layout, dtype: torch.dtype) -> None:
    for rows in (1, 2):
        for heads in (1, 3):
            for count in (0, 1, 2, 5):
                for value_dim in (4, 6):
                    drawn = Drawn(0, dtype)
                    keys = drawn.numbers(rows, heads, count, 4)
                    values = drawn.numbers(rows, heads, count, value_dim)
                    _check_flat(*layout(keys, values))


def _check_flat(keys: Tensor, values: Tensor) -> None:
    rows, heads, count, _ = keys.shape
    flat_keys, key_step, flat_values, value_step, places = as_flat(keys, values)
    for flat, step, vectors in ((flat_keys, key_step, keys), (flat_values, value_step, values)):
        assert flat.ndim == 1
        numbers = torch.from_numpy(flat)
        numbers = numbers.view(torch.bfloat16) if vectors.dtype == torch.bfloat16 else numbers
        for job in range(rows * heads):
            for place in range(count):
                start = (job * places + place) * step
                found = numbers[start : start + vectors.shape[3]]
                assert torch.equal(found, vectors[job // heads, job % heads, place])


@pytest.mark.parametrize("layout", [contiguous, side_by_side, with_room])
def test_what_pools_return_is_read_where_it_lies(layout: Layout) -> None:
    drawn = Drawn(0, torch.bfloat16)
    keys, values = layout(drawn.numbers(2, 3, 7, 8), drawn.numbers(2, 3, 7, 8))
    flat_keys, _, flat_values, _, _ = as_flat(keys, values)
    assert flat_keys.ctypes.data == keys.data_ptr()
    assert flat_values.ctypes.data == values.data_ptr()


# Attention.


def ask(
    kernels: Kernels,
    query: Tensor,
    entries: Entries,
    counts: list[int] | None,
    keys: Tensor,
    values: Tensor,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    meant = None if counts is None else torch.tensor(counts)[:, None]
    plain, nothing = kernels.attend(
        query, entries, meant, keys, values, scaling=SCALING, softcap=softcap
    )
    output, weights = kernels.attend(
        query, entries, meant, keys, values, scaling=SCALING, softcap=softcap, weighed=True
    )
    assert nothing is None and weights is not None
    assert torch.equal(plain, output)
    return output, weights


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 3),
    heads=st.integers(1, 3),
    group=st.integers(1, 9),
    places=st.integers(0, 21),
    widths=st.tuples(st.integers(1, 18), st.integers(1, 18)),
    softcap=st.none() | st.sampled_from([0.5, 2.0]),
    indexed=st.booleans(),
    ragged=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    data=st.data(),
)
def test_attention_equals_a_loop(
    seed: int,
    dtype: torch.dtype,
    rows: int,
    heads: int,
    group: int,
    places: int,
    widths: tuple[int, int],
    softcap: float | None,
    indexed: bool,
    ragged: bool,
    layout: Layout,
    data: st.DataObject,
) -> None:
    drawn = Drawn(seed, dtype)
    query = drawn.numbers(rows, heads * group, 1, widths[0], size=2)
    held = (drawn.numbers(rows, heads, places, width) for width in widths)
    keys, values = (drawn.numbers(rows, heads, 1, width) for width in widths)
    index, columns = None, places
    if indexed:
        columns = data.draw(st.integers(0, places))
        order = [drawn.below(2**30, places).argsort()[:columns] for _ in range(rows * heads)]
        index = torch.stack(order).view(rows, heads, columns)
    counts = None
    if ragged:
        counts = data.draw(st.lists(st.integers(0, columns), min_size=rows, max_size=rows))
    entries = Entries(*layout(*held), index)
    output, weights = ask(NativeKernels(), query, entries, counts, keys, values, softcap)
    expected, sums = naive(query, entries, counts or [columns] * rows, keys, values, softcap)
    close(output, expected, dtype)
    close(weights, sums, torch.float32)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("counts", [None, [6, 0, 3]])
def test_both_kernels_are_the_loop(
    kernels: type[Kernels], softcap: float | None, counts: list[int] | None
) -> None:
    drawn = Drawn(1, torch.float32)
    held = Entries(drawn.numbers(3, 2, 20, 8), drawn.numbers(3, 2, 20, 6), drawn.below(20, 3, 2, 6))
    query, keys = drawn.numbers(3, 6, 1, 8, size=2), drawn.numbers(3, 2, 1, 8)
    values = drawn.numbers(3, 2, 1, 6)
    output, weights = ask(kernels(), query, held, counts, keys, values, softcap)
    expected, sums = naive(query, held, counts or [6] * 3, keys, values, softcap)
    close(output, expected, torch.float32)
    close(weights, sums, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_those_of_a_float64_softmax(dtype: torch.dtype) -> None:
    drawn = Drawn(2, dtype)
    query, keys, values = (drawn.numbers(2, h, n, 16) for h, n in ((6, 1), (2, 40), (2, 40)))
    own = Entries(keys[:, :, :-1], values[:, :, :-1], None)
    _, weights = ask(NativeKernels(), query, own, None, keys[:, :, -1:], values[:, :, -1:], None)
    scores = query.double().view(2, 2, 3, 16) @ keys.double().mT * SCALING
    close(weights, scores.softmax(-1).sum(2), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_over_everything(
    dtype: torch.dtype, softcap: float | None, tokens: int, layout: Layout
) -> None:
    for rows, kv_heads in ((2, 2), (1, 2), (2, 1), (1, 1)):
        drawn = Drawn(3, dtype)
        query = drawn.numbers(rows, 3 * kv_heads, 1, 8)
        keys, values = layout(
            drawn.numbers(rows, kv_heads, tokens, 8), drawn.numbers(rows, kv_heads, tokens, 6)
        )
        output = NativeKernels().attend_all(
            query, keys, values, mask=None, scaling=SCALING, softcap=softcap
        )
        others = Entries(keys[:, :, :-1], values[:, :, :-1], None)
        expected, _ = naive(
            query, others, [tokens - 1] * rows, keys[:, :, -1:], values[:, :, -1:], softcap
        )
        close(output, expected, dtype)


def test_attention_over_everything_that_a_mask_leaves() -> None:
    drawn = Drawn(4, torch.float32)
    query, keys, values = (drawn.numbers(2, h, n, 8) for h, n in ((4, 1), (2, 9), (2, 9)))
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[1, ..., :4] = False
    found = NativeKernels().attend_all(
        query, keys, values, mask=mask, scaling=SCALING, softcap=None
    )
    for row, first in enumerate((0, 4)):
        one = slice(row, row + 1)
        others = Entries(keys[one, :, first:-1], values[one, :, first:-1], None)
        expected, _ = naive(
            query[one], others, [8 - first], keys[one, :, -1:], values[one, :, -1:], None
        )
        close(found[one], expected, torch.float32)


def test_scratch_memory_carries_nothing_over() -> None:
    kernels = NativeKernels()
    for seed, (rows, heads, group, count) in enumerate(
        [(2, 3, 2, 50), (1, 1, 5, 7), (3, 2, 1, 90), (2, 3, 2, 51), (2, 3, 3, 9)]
    ):
        drawn = Drawn(seed, torch.float32)
        query = drawn.numbers(rows, heads * group, 1, 8)
        held_keys, held_values = (drawn.numbers(rows, heads, count, 8) for _ in range(2))
        held = Entries(held_keys, held_values, None)
        keys, values = (drawn.numbers(rows, heads, 1, 8) for _ in range(2))
        counts = [count - row for row in range(rows)]
        output, weights = ask(kernels, query, held, counts, keys, values, None)
        expected, sums = naive(query, held, counts, keys, values, None)
        close(output, expected, torch.float32)
        close(weights, sums, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_may_be_strided_and_need_gradients(dtype: torch.dtype) -> None:
    """Every second row of a batch, as a caller may take them, heads inside of tokens."""
    drawn = Drawn(5, dtype)
    query = drawn.numbers(4, 1, 6, 8).transpose(1, 2)[::2].requires_grad_()
    keys = drawn.numbers(4, 1, 2, 8).transpose(1, 2)[::2].requires_grad_()
    values = drawn.numbers(4, 1, 2, 6).transpose(1, 2)[::2]
    held = Entries(
        drawn.numbers(4, 2, 9, 8)[::2].requires_grad_(),
        drawn.numbers(4, 2, 9, 6)[::2],
        drawn.below(9, 4, 2, 10)[::2, :, ::2],
    )
    assert held.places is not None and not held.places.is_contiguous()
    output, weights = ask(NativeKernels(), query, held, [5, 2], keys, values, None)
    expected, sums = naive(query, held, [5, 2], keys, values, None)
    close(output, expected.detach(), dtype)
    close(weights, sums.detach(), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3])
def test_scores_far_beyond_the_range_of_exp(dtype: torch.dtype, group: int) -> None:
    keys = torch.tensor([-1000.0, 500.0, 499.0, 0.0]).view(1, 1, 4, 1).to(dtype)
    values = torch.tensor([7.0, 1.0, 2.0, 9.0]).view(1, 1, 4, 1).to(dtype)
    query = torch.ones(1, group, 1, 1, dtype=dtype) / SCALING
    entries = Entries(keys, values, None)
    own = torch.zeros(1, 1, 1, 1, dtype=dtype)
    output, weights = ask(NativeKernels(), query, entries, None, own, own, None)
    expected, sums = naive(query, entries, [4], own, own, None)
    close(output, expected, dtype)
    torch.testing.assert_close(weights.double(), sums, atol=1e-4, rtol=0)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("group", [1, 2])
def test_the_largest_score_may_be_anywhere(count: int, group: int) -> None:
    """The own token's included; scores so far apart that nothing else has a weight."""
    values = torch.arange(count + 1.0).view(1, 1, -1, 1)
    query = torch.ones(1, group, 1, 1) / SCALING
    for place in range(count + 1):
        keys = torch.zeros(1, 1, count + 1, 1)
        keys[0, 0, place] = 200
        output = NativeKernels().attend_all(
            query, keys, values, mask=None, scaling=SCALING, softcap=None
        )
        assert output.flatten().tolist() == [place] * group


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["query", "keys", "own key", "values"])
def test_what_is_no_number_stays_visible(dtype: torch.dtype, number: float, where: str) -> None:
    """In the heads that it concerns, as in PyTorch; the others are untouched."""
    drawn = Drawn(6, dtype)
    query, keys, values, own = (
        drawn.numbers(2, h, n, 8).abs() for h, n in ((4, 1), (2, 9), (2, 9), (2, 1))
    )
    {"query": query, "keys": keys, "own key": own, "values": values}[where][1, 1, 0, 3] = number
    concerned = [1] if where == "query" else [2, 3]
    output, _ = NativeKernels().attend(
        query, Entries(keys, values, None), None, own, own, scaling=SCALING, softcap=None
    )
    expected, _ = TorchKernels().attend(
        query, Entries(keys, values, None), None, own, own, scaling=SCALING, softcap=None
    )
    assert not output[1, 0, concerned].isfinite().all()
    assert torch.equal(output.isfinite(), expected.isfinite())
    assert output[0].isfinite().all()


# Partial keys of a new token.


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 3),
    heads=st.integers(1, 3),
    dim=st.integers(1, 20),
    rank=st.integers(1, 20),
    centred=st.booleans(),
    strided=st.booleans(),
)
def test_appended_partial_keys_are_those_of_the_projection(
    seed: int,
    dtype: torch.dtype,
    rows: int,
    heads: int,
    dim: int,
    rank: int,
    centred: bool,
    strided: bool,
) -> None:
    drawn, exact = Drawn(seed, dtype), Drawn(seed + 1, torch.float32)
    projection = Projection(
        exact.numbers(rows, heads, dim, rank),
        exact.numbers(rows, heads, dim, rank),
        exact.numbers(rows, heads, 1, dim) if centred else None,
    )
    keys = drawn.numbers(rows, heads, 6, dim)
    if strided:
        projection.key = projection.key.mT.contiguous().mT
        keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    partial = PartialKeys(keys[:, :, :4], projection)
    before = partial.view().clone()
    NativeKernels().append(partial, keys[:, :, 4:5])
    NativeKernels().append(partial, keys[:, :, 5:])
    assert partial.length == 6
    assert torch.equal(partial.view()[:, :, :4], before)
    offset = 0 if projection.offset is None else projection.offset.double()
    expected = (keys[:, :, 4:].double() - offset) @ projection.key.double()
    size = (keys[:, :, 4:].double() - offset).abs() @ projection.key.double().abs()
    found = partial.view()[:, :, 4:]
    assert found.dtype == dtype
    error = (found.double() - expected).abs()
    assert bool(
        (error <= 1e-6 * size + (2**-8 * expected.abs() if dtype != torch.float32 else 0)).all()
    )


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_appending_beyond_the_room_keeps_all(kernels: type[Kernels], dtype: torch.dtype) -> None:
    """Written to in `torch.inference_mode` and out of it."""
    drawn = Drawn(7, dtype)
    keys = drawn.numbers(2, 2, SPARE_TOKENS + 10, 3)
    square = torch.eye(3).expand(2, 2, 3, 3)
    with torch.inference_mode():
        partial = PartialKeys(keys[:, :, :2], Projection(square.clone(), square.clone(), None))
    used = kernels()
    for token in range(2, keys.shape[2]):
        with torch.inference_mode(token % 2 == 0):
            used.append(partial, keys[:, :, token : token + 1])
    assert torch.equal(partial.view(), keys)


def test_a_partial_key_that_is_no_number_is_kept_as_such() -> None:
    keys = torch.tensor([math.nan, math.inf]).view(1, 1, 1, 2).bfloat16()
    square = torch.eye(2).view(1, 1, 2, 2)
    partial = PartialKeys(keys[:, :, :0], Projection(square, square, None))
    NativeKernels().append(partial, keys)
    assert not np.isfinite(partial.view().float().numpy()).any()
