"""Codecs: error bounds from the definition, bytes, large channels, and numbers they must refuse."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from infinigen_kv.errors import InfiniGenError, InputError
from infinigen_kv.storage.homes.codec import CODECS, GROUP, Codec, EntryShape, codec_by_name

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LEVELS = {"int8": 255, "int4": 15}
DIMS = [(8, 8), (7, 7), (6, 10), (5, 8)]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def round_trip(codec: Codec, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Encode, and decode with a scale given for every token."""
    shape = EntryShape(keys.shape[3], values.shape[3], keys.dtype)
    entries, scales = codec.encode(keys, values)
    assert entries.dtype == torch.uint8
    assert entries.shape == (*keys.shape[:3], codec.entry_bytes(shape))
    if scales is not None:
        assert scales.shape == (*keys.shape[:2], keys.shape[2] // GROUP, 2 * keys.shape[3])
        scales = scales.repeat_interleave(GROUP, dim=2)
    return codec.decode(entries, scales, shape)


def allowed_error(exact: Tensor, axis: int, levels: int) -> Tensor:
    """Half a scale, the scale rounded up to the dtype, and the rounding of the result."""
    eps = torch.finfo(exact.dtype).eps
    exact = exact.double()
    scale = (exact.amax(axis, keepdim=True) - exact.amin(axis, keepdim=True)) / levels
    # a code near a half may round to either side: the quotient has float32's rounding
    quotient = scale * levels * torch.finfo(torch.float32).eps
    return scale * (1 + eps) / 2 + exact.abs() * eps / 2 + scale * eps + quotient


def grouped(keys: Tensor) -> Tensor:
    return keys.unflatten(2, (-1, GROUP))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_none_keeps_every_bit(dtype: torch.dtype) -> None:
    keys, values = numbers(2, 3, 5, 8, dtype=dtype), numbers(2, 3, 5, 6, seed=1, dtype=dtype)
    keys[0, 0, 0, :3] = torch.tensor([float("nan"), float("-inf"), -0.0])
    found_keys, found_values = round_trip(codec_by_name("none"), keys, values)
    assert torch.equal(found_keys.contiguous().view(torch.uint8), keys.view(torch.uint8))
    assert torch.equal(found_values, values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("name", LEVELS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 9999), size=st.sampled_from([1e-4, 1.0, 300.0]), shift=st.floats(-9, 9))
def test_error_is_at_most_half_a_scale(
    name: str, dims: tuple[int, int], dtype: torch.dtype, seed: int, size: float, shift: float
) -> None:
    keys = (numbers(2, 1, 2 * GROUP, dims[0], seed=seed) * size + shift).to(dtype)
    values = (numbers(2, 1, 2 * GROUP, dims[1], seed=seed + 1) * size + shift).to(dtype)
    found_keys, found_values = round_trip(codec_by_name(name), keys, values)
    assert found_keys.dtype == found_values.dtype == dtype
    # one more step of the dtype's subnormal numbers: below them nothing is relative
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * LEVELS[name]
    allowed = allowed_error(grouped(keys), 3, LEVELS[name]).flatten(2, 3) + least
    assert ((found_keys.double() - keys.double()).abs() <= allowed).all()
    allowed = allowed_error(values, 3, LEVELS[name]) + least
    assert ((found_values.double() - values.double()).abs() <= allowed).all()


@pytest.mark.parametrize("name", LEVELS)
def test_equals_a_naive_loop(name: str) -> None:
    keys, values = numbers(1, 2, GROUP, 5), numbers(1, 2, GROUP, 3, seed=1)
    found_keys, found_values = round_trip(codec_by_name(name), keys, values)
    for head, token in itertools.product(range(2), range(GROUP)):
        lines = [(found_keys, keys[0, head, :, channel], channel) for channel in range(5)]
        lines += [(found_values, values[0, head, token], channel) for channel in range(3)]
        for found, line, channel in lines:
            low, high = float(line.min()), float(line.max())
            step = (high - low) / LEVELS[name]
            exact = float(line[token] if found is found_keys else line[channel])
            expected = low + round((exact - low) / step) * step
            assert float(found[0, head, token, channel]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_numbers_are_exact(name: str, dtype: torch.dtype) -> None:
    keys, values = numbers(1, 2, GROUP, 8, dtype=dtype), numbers(1, 2, GROUP, 8, dtype=dtype)
    keys[..., 3], keys[..., 4] = 100.7, 0.0
    values[0, 1, 7] = -1.3e-5
    found_keys, found_values = round_trip(codec_by_name(name), keys, values)
    assert torch.equal(found_keys[..., 3:5], keys[..., 3:5])
    assert torch.equal(found_values[0, 1, 7], values[0, 1, 7])


def per_token(keys: Tensor, levels: int) -> Tensor:
    """Keys quantised as a naive codec would: one scale per token."""
    low, high = keys.amin(-1, keepdim=True), keys.amax(-1, keepdim=True)
    scale = (high - low) / levels
    return ((keys - low) / scale).round() * scale + low


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "allowed"), [("int8", 0.02), ("int4", 0.1)])
def test_large_key_channels_do_not_blur_the_scores(
    name: str, allowed: float, dtype: torch.dtype
) -> None:
    """Case O: with a bias on the keys, a few channels are 100 times larger than the others."""
    keys, values = numbers(2, 2, 8 * GROUP, 64), numbers(2, 2, 8 * GROUP, 64, seed=1)
    keys[..., 5] += 100.0
    keys[..., 40] -= 250.0
    query = numbers(2, 2, 16, 64, seed=2)
    keys = keys.to(dtype)

    def differences(keys: Tensor) -> Tensor:
        """Scores up to a constant per query, which a softmax does not see."""
        scores = query @ keys.float().mT
        return scores - scores.mean(dim=-1, keepdim=True)

    exact = differences(keys)
    found, _ = round_trip(codec_by_name(name), keys, values.to(dtype))
    error = (differences(found) - exact).norm() / exact.norm()
    naive = (differences(per_token(keys.float(), LEVELS[name])) - exact).norm() / exact.norm()
    assert error < allowed
    assert naive > 10 * error


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), None])
def test_numbers_that_cannot_be_quantised_are_refused(
    name: str, dtype: torch.dtype, bad: float | None
) -> None:
    number = torch.finfo(dtype).max if bad is None else bad
    keys, values = numbers(1, 2, GROUP, 8, dtype=dtype), numbers(1, 2, GROUP, 8, dtype=dtype)
    good = keys.clone()
    keys[0, 1, 5, 2] = number
    with pytest.raises(InfiniGenError, match="1 numbers of the keys cannot be quantised"):
        codec_by_name(name).encode(keys, values)
    values[0, 0, 0, 0] = number
    with pytest.raises(InfiniGenError, match=r"the values cannot .* load it in a wider dtype"):
        codec_by_name(name).encode(good, values)


@pytest.mark.parametrize(
    ("name", "dims", "dtype", "expected"),
    [
        ("none", (64, 64), torch.bfloat16, 256),
        ("none", (6, 10), torch.float32, 64),
        ("int8", (64, 64), torch.bfloat16, 132),
        ("int8", (5, 8), torch.float32, 24),  # 8 + 13, to a multiple of 4
        ("int4", (64, 64), torch.bfloat16, 68),
        ("int4", (64, 64), torch.float32, 72),
        ("int4", (7, 8), torch.float16, 12),  # 4 + 8
    ],
)
def test_bytes_of_an_entry(
    name: str, dims: tuple[int, int], dtype: torch.dtype, expected: int
) -> None:
    assert codec_by_name(name).entry_bytes(EntryShape(*dims, dtype)) == expected


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dims", DIMS)
def test_one_scale_may_stand_for_a_group(name: str, dims: tuple[int, int]) -> None:
    keys, values = numbers(2, 3, 4 * GROUP, dims[0]), numbers(2, 3, 4 * GROUP, dims[1])
    codec = codec_by_name(name)
    entries, scales = codec.encode(keys, values)
    assert scales is not None
    found = codec.decode(grouped(entries), scales.unsqueeze(3), EntryShape(*dims, torch.float32))
    for by_group, by_token in zip(found, round_trip(codec, keys, values), strict=True):
        assert torch.equal(by_group.flatten(2, 3), by_token)


@pytest.mark.parametrize("name", CODECS)
def test_entries_are_decoded_wherever_they_lie(name: str) -> None:
    """As in a staging buffer: not contiguous, and not at its start."""
    keys, values = numbers(1, 2, GROUP, 5).half(), numbers(1, 2, GROUP, 8).half()
    codec, shape = codec_by_name(name), EntryShape(5, 8, torch.float16)
    entries, scales = codec.encode(keys, values)
    buffer = torch.zeros(1, 2, 2 * GROUP + 1, entries.shape[3], dtype=torch.uint8)
    staged = buffer[:, :, 1::2]
    staged.copy_(entries)
    spread = None if scales is None else scales.repeat_interleave(GROUP, dim=2)
    for found, expected in zip(
        codec.decode(staged, spread, shape), round_trip(codec, keys, values), strict=True
    ):
        assert torch.equal(found, expected)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(
        InputError, match="codec='int2' is not valid: it must be one of none, int8, int4"
    ):
        codec_by_name("int2")
