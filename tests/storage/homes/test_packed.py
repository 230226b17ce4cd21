"""Packed homes against plain tensors: bit for bit without a codec, within its error with one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch import Tensor

from infinigen_kv.errors import InfiniGenError, InputError
from infinigen_kv.storage.homes.codec import CODECS, GROUP, codec_by_name
from infinigen_kv.storage.homes.packed import CHUNK, PackedHome
from infinigen_kv.storage.homes.store import RamStore
from infinigen_kv.storage.homes.unpacked import UnpackedHome

HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6
HALF_SCALE = {"none": 0.0, "int8": 1.001 / 255, "int4": 1.001 / 15}  # for numbers in -1 to 1


def tokens(rows: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values between -1 and 1."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(rows, HEADS, count, KEY_DIM, generator=generator) * 2 - 1
    return keys, torch.rand(rows, HEADS, count, VALUE_DIM, generator=generator) * 2 - 1


def empty_home(name: str, rows: int = 2, capacity: int = 0) -> PackedHome:
    return PackedHome(*tokens(rows, 0, 0), codec_by_name(name), RamStore, capacity)


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


class PackedMachine(RuleBasedStateMachine):
    """Random operations on a packed home and on exact tokens.

    ``exact_from`` is where the tokens begin that were never packed.
    """

    codec: str

    @initialize()
    def start(self) -> None:
        self.home = empty_home(self.codec)
        self.exact = UnpackedHome(*tokens(2, 0, 0))
        self.exact_from = 0
        self.passes = 1  # how often a token can have been quantised

    @rule(count=st.sampled_from([0, 1, 1, 2, 7, 30, 31, 32, 33, 70, 290]), seed=st.integers(0, 99))
    def append(self, count: int, seed: int) -> None:
        keys, values = tokens(self.exact.rows, count, seed)
        before = self.home.stored_length
        self.exact.append(keys, values)
        self.home.append(keys, values)
        keys.zero_()  # the home must not hold on to what it was given
        values.zero_()
        if self.home.stored_length > before:
            self.exact_from = max(self.exact_from, self.home.stored_length)

    @rule(back=st.sampled_from([1, 2, 5, 31, 32, 33, 100, 10_000]), ahead=st.booleans())
    def truncate(self, back: int, ahead: bool) -> None:
        length = self.exact.length + back if ahead else self.exact.length - back
        self.home.truncate(length)
        self.exact.truncate(length)
        self.exact_from = min(self.exact_from, self.exact.length)
        self.passes += 1
        if self.exact.length == 0:
            self.passes = 1

    @rule(data=st.data())
    def take_rows(self, data: st.DataObject) -> None:
        places = st.integers(0, self.exact.rows - 1)
        index = torch.tensor(data.draw(st.lists(places, min_size=1, max_size=3)))
        self.home.take_rows(index)
        self.exact.take_rows(index)

    @precondition(lambda self: self.exact.length > 0)
    @rule(count=st.integers(0, 5), seed=st.integers(0, 999))
    def gather(self, count: int, seed: int) -> None:
        slots = self.some_slots(count, seed)
        assert_equal(self.home.gather(slots), pick(self.home.all(), slots))

    @precondition(lambda self: self.exact.length > 0)
    @rule(count=st.integers(1, 5), seed=st.integers(0, 999), new=st.sampled_from([1, 40, 400]))
    def a_reading_does_not_see_later_tokens(self, count: int, seed: int, new: int) -> None:
        slots = self.some_slots(count, seed)
        expected = self.home.gather(slots)
        everything = [part.clone() for part in self.home.all()]
        reading, full = self.home.prepare(slots), self.home.prepare_all()
        some_entries = self.home.store.read(reading.slots)
        all_entries = self.home.store.read_all().clone()
        self.append(new, seed)
        assert_equal(reading.decode(some_entries), expected)
        assert full.slots is None
        assert_equal(full.decode(all_entries), everything)

    @invariant()
    def content_is_the_same(self) -> None:
        home, exact = self.home, self.exact
        assert (home.rows, home.length) == (exact.rows, exact.length)
        assert home.stored_length == home.length // home.codec.group * home.codec.group
        allowed = self.passes * HALF_SCALE[self.codec]
        for found, expected in zip(home.all(), exact.all(), strict=True):
            assert found.shape == expected.shape
            assert ((found - expected).abs() <= allowed).all()
            fresh = slice(self.exact_from, None)
            assert torch.equal(found[:, :, fresh], expected[:, :, fresh])

    def some_slots(self, count: int, seed: int) -> Tensor:
        shape = self.exact.rows, HEADS, count
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.exact.length, shape, generator=generator)


def pick(tensors: Sequence[Tensor], slots: Tensor) -> list[Tensor]:
    return [tensor.take_along_dim(slots.unsqueeze(-1), dim=2) for tensor in tensors]


def machine(name: str) -> type[PackedMachine]:
    class Machine(PackedMachine):
        codec = name

    Machine.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
    return Machine


TestNone = machine("none").TestCase
TestInt8 = machine("int8").TestCase
TestInt4 = machine("int4").TestCase


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_tokens_are_exact_until_their_group_is_complete(name: str) -> None:
    home = empty_home(name)
    keys, values = tokens(2, GROUP, seed=1)
    for token in range(GROUP - 1):
        home.append(keys[:, :, token : token + 1], values[:, :, token : token + 1])
    assert home.stored_length == 0
    assert_equal(home.all(), [keys[:, :, :-1], values[:, :, :-1]])
    home.append(keys[:, :, -1:], values[:, :, -1:])
    assert home.stored_length == GROUP
    assert not torch.equal(home.all()[0], keys)
    entries, scales = home.codec.encode(keys, values)
    assert scales is not None
    assert_equal(home.all(), home.codec.decode(entries, scales, home.shape))


@pytest.mark.parametrize("name", CODECS)
def test_how_tokens_arrive_makes_no_difference(name: str) -> None:
    keys, values = tokens(2, CHUNK + 3 * GROUP + 5, seed=2)
    at_once, in_parts = empty_home(name), empty_home(name)
    at_once.append(keys, values)
    for part in zip(keys.split(100, dim=2), values.split(100, dim=2), strict=True):
        in_parts.append(*part)
    assert_equal(at_once.all(), in_parts.all())


@pytest.mark.parametrize("name", CODECS)
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    keys, values = tokens(3, 2 * GROUP + 5, seed=3)
    together, alone = empty_home(name, rows=3), empty_home(name, rows=1)
    together.append(keys, values)
    alone.append(keys[1:2], values[1:2])
    assert_equal([part[1:2] for part in together.all()], alone.all())


def test_cutting_a_group_and_going_on_packs_it_again() -> None:
    home = empty_home("int8")
    home.append(*tokens(2, 2 * GROUP, seed=4))
    home.truncate(GROUP + 10)
    assert (home.stored_length, home.length) == (GROUP, GROUP + 10)
    kept = home.all()
    new = tokens(2, GROUP, seed=5)
    home.append(*new)
    assert (home.stored_length, home.length) == (2 * GROUP, 2 * GROUP + 10)
    for found, old, added in zip(home.all(), kept, new, strict=True):
        expected = torch.cat([old, added], dim=2)
        assert torch.equal(found[:, :, :GROUP], expected[:, :, :GROUP])
        assert (found - expected).abs().max() <= HALF_SCALE["int8"]
        assert torch.equal(found[:, :, 2 * GROUP :], expected[:, :, 2 * GROUP :])


@pytest.mark.parametrize("held", [0, 5])
def test_a_token_that_cannot_be_packed_leaves_the_home_as_it_was(held: int) -> None:
    home = empty_home("int4")
    home.append(*tokens(2, 2 * GROUP + held, seed=6))
    before = [part.clone() for part in home.all()]
    keys, values = tokens(2, CHUNK + 2 * GROUP, seed=7)
    values[1, 0, CHUNK + GROUP // 2] = float("nan")
    with pytest.raises(InfiniGenError, match="values cannot be quantised"):
        home.append(keys, values)
    assert home.length == 2 * GROUP + held
    assert_equal(home.all(), before)
    home.append(*tokens(2, GROUP, seed=8))
    assert home.length == 3 * GROUP + held


def test_bytes() -> None:
    home = empty_home("int4", capacity=10_000)
    entry = 8 + (KEY_DIM + VALUE_DIM) // 2 + 3  # to a multiple of 4
    assert home.nbytes == 2 * HEADS * 10_000 * entry
    scales = 2 * HEADS * (10_000 // GROUP) * 2 * KEY_DIM * 4
    tail = 2 * HEADS * GROUP * (KEY_DIM + VALUE_DIM) * 4
    assert home.side_bytes == scales + tail
    assert empty_home("none").side_bytes == 0


def test_two_dtypes_are_refused() -> None:
    keys, values = tokens(1, 0, 0)
    with pytest.raises(InputError, match=r"keys are torch.float16 and values torch.float32"):
        PackedHome(keys.half(), values, codec_by_name("int8"), RamStore)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CODECS)
def test_the_models_dtype_comes_back(name: str, dtype: torch.dtype) -> None:
    keys, values = (part.to(dtype) for part in tokens(1, GROUP + 3, seed=10))
    home = PackedHome(keys, values, codec_by_name(name), RamStore)
    home.append(keys, values)
    for found in (*home.all(), *home.gather(torch.tensor([0, 33]).expand(1, HEADS, 2))):
        assert found.dtype == dtype
