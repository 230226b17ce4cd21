"""Codecs: how keys and values become the bytes that a home stores and a link moves.

An entry is the key and value of one token and KV head. The quantising codecs are asymmetric: a
number x becomes the code ``round((x - zero) / scale)``. Keys get a scale and zero for every channel
of ``GROUP`` consecutive tokens, since a few channels of a key are far larger than the others in all
tokens (most of all where the key projection has a bias); values get one pair per token and head
(KIVI, arXiv 2402.02750). A key's scales stay on the device, a value's travel in its entry.

Scales and zeros have the model's dtype. A zero is one of the numbers it stands for, so it is exact;
a scale is rounded up, so that the codes still reach the largest number. Hence the error is at most
half a scale, plus the rounding of the result to the dtype, and 0 where all numbers are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infinigen_kv.errors import InfiniGenError, InputError

GROUP = 32  # tokens that share the scales of their keys


@dataclass(frozen=True, slots=True)
class EntryShape:
    """What one entry holds: ``dim`` key channels, ``value_dim`` value channels, of ``dtype``."""

    dim: int
    value_dim: int
    dtype: torch.dtype


class Packed(NamedTuple):
    """Encoded tokens: ``(B, H_kv, Q, E)`` uint8, and for each group the scales and zeros of its
    keys side by side, ``(B, H_kv, Q / group, 2 D)``, or None.
    """

    entries: Tensor
    scales: Tensor | None


class Codec(ABC):
    """Packs keys and values into bytes. Has no state."""

    name: str
    group: int
    """Tokens that must be packed together."""

    @abstractmethod
    def entry_bytes(self, shape: EntryShape) -> int:
        """E, the bytes of one entry; a multiple of the dtype's size."""

    @abstractmethod
    def encode(self, keys: Tensor, values: Tensor) -> Packed:
        """Pack ``keys`` ``(B, H_kv, Q, D)`` and ``values`` ``(B, H_kv, Q, D_v)``, whole groups.

        Raises
        ------
        InfiniGenError
            Where the codec cannot represent a number: NaN, infinite or too large.
        """

    @abstractmethod
    def decode(
        self, entries: Tensor, scales: Tensor | None, shape: EntryShape
    ) -> tuple[Tensor, Tensor]:
        """Unpack keys ``(..., n, D)`` and values ``(..., n, D_v)``; may share the entries' memory.

        Parameters
        ----------
        entries
            ``(..., n, E)`` uint8.
        scales
            ``(..., n, 2 D)``: of each entry's group; or ``(..., 1, 2 D)`` where all are of one.
        shape
            As the tokens were encoded.
        """


class RawCodec(Codec):
    """The bytes of the numbers themselves."""

    name = "none"
    group = 1

    def entry_bytes(self, shape: EntryShape) -> int:
        return (shape.dim + shape.value_dim) * shape.dtype.itemsize

    def encode(self, keys: Tensor, values: Tensor) -> Packed:
        return Packed(torch.cat([keys, values], dim=-1).view(torch.uint8), None)

    def decode(
        self, entries: Tensor, scales: Tensor | None, shape: EntryShape
    ) -> tuple[Tensor, Tensor]:
        numbers = entries.view(shape.dtype)
        return numbers[..., : shape.dim], numbers[..., shape.dim :]


class QuantisingCodec(Codec):
    """What int8 and int4 share. An entry is the value's scale and zero, then all codes."""

    group = GROUP
    levels: int
    """Steps between the least and the largest code."""

    @abstractmethod
    def code_bytes(self, codes: int) -> int:
        """Bytes that so many codes take."""

    @abstractmethod
    def pack(self, keys: Tensor, values: Tensor) -> Tensor:
        """Bytes ``(..., code_bytes)`` of codes ``(..., D)`` and ``(..., D_v)`` uint8."""

    @abstractmethod
    def unpack(self, packed: Tensor, shape: EntryShape) -> tuple[Tensor, Tensor]:
        """Undo `pack`."""

    def entry_bytes(self, shape: EntryShape) -> int:
        unit = shape.dtype.itemsize
        units = -(-self.code_bytes(shape.dim + shape.value_dim) // unit)
        return (2 + units) * unit

    def encode(self, keys: Tensor, values: Tensor) -> Packed:
        rows, heads, tokens, dim = keys.shape
        shape = EntryShape(dim, values.shape[-1], keys.dtype)
        groups = keys.unflatten(2, (tokens // self.group, self.group))
        key_codes, key_scale, key_zero = quantise(groups, 3, self.levels, "keys")
        value_codes, value_scale, value_zero = quantise(values, 3, self.levels, "values")
        entries = keys.new_zeros(rows, heads, tokens, self.entry_bytes(shape), dtype=torch.uint8)
        head = entries[..., : 2 * shape.dtype.itemsize].view(shape.dtype)
        head[..., :1], head[..., 1:] = value_scale, value_zero
        codes = self._codes(entries, shape)
        codes.copy_(self.pack(key_codes.flatten(2, 3), value_codes))
        return Packed(entries, torch.cat([key_scale, key_zero], dim=-1).squeeze(3))

    def decode(
        self, entries: Tensor, scales: Tensor | None, shape: EntryShape
    ) -> tuple[Tensor, Tensor]:
        assert scales is not None
        dim, dtype = shape.dim, shape.dtype
        key_codes, value_codes = self.unpack(self._codes(entries, shape), shape)
        # addcmul computes half precision in float32 and rounds once, but is slow on a CPU where
        # one scale stands for a whole line.
        keys = torch.addcmul(scales[..., dim:], key_codes.to(dtype), scales[..., :dim])
        head = entries[..., : 2 * dtype.itemsize].view(dtype)
        head = head.to(torch.promote_types(dtype, torch.float32))
        values = value_codes.to(head.dtype).mul_(head[..., :1]).add_(head[..., 1:])
        return keys, values.to(dtype)

    def _codes(self, entries: Tensor, shape: EntryShape) -> Tensor:
        start = 2 * shape.dtype.itemsize
        return entries[..., start : start + self.code_bytes(shape.dim + shape.value_dim)]


class Int8Codec(QuantisingCodec):
    """A byte per number."""

    name = "int8"
    levels = 255

    def code_bytes(self, codes: int) -> int:
        return codes

    def pack(self, keys: Tensor, values: Tensor) -> Tensor:
        return torch.cat([keys, values], dim=-1)

    def unpack(self, packed: Tensor, shape: EntryShape) -> tuple[Tensor, Tensor]:
        return packed[..., : shape.dim], packed[..., shape.dim :]


class Int4Codec(QuantisingCodec):
    """Two numbers a byte: the low halves hold the first half of the codes, the high ones the rest.

    Where keys are as wide as values, the low halves are the keys and the high ones the values.
    """

    name = "int4"
    levels = 15

    def code_bytes(self, codes: int) -> int:
        return -(-codes // 2)

    def pack(self, keys: Tensor, values: Tensor) -> Tensor:
        codes = torch.cat([keys, values], dim=-1)
        low, high = codes.split(self.code_bytes(codes.shape[-1]), dim=-1)
        return low | F.pad(high, (0, low.shape[-1] - high.shape[-1])) << 4

    def unpack(self, packed: Tensor, shape: EntryShape) -> tuple[Tensor, Tensor]:
        low, high = packed & 15, packed >> 4
        if shape.dim == shape.value_dim:
            return low, high
        codes = torch.cat([low, high], dim=-1)
        return codes[..., : shape.dim], codes[..., shape.dim : shape.dim + shape.value_dim]


def quantise(numbers: Tensor, axis: int, levels: int, what: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 to ``levels`` for ``numbers``, with a scale and zero for each line along ``axis``.

    Parameters
    ----------
    numbers
        Of a floating dtype.
    axis
        Where the numbers that share a scale are.
    levels
        At most 255.
    what
        For the error: what the numbers are.

    Returns
    -------
    tuple of Tensor
        Codes, uint8, shaped like ``numbers``; scale and zero in the dtype of ``numbers``, with 1
        entry along ``axis``.

    Raises
    ------
    InfiniGenError
        For NaN, infinities, and numbers above half of what the dtype can hold, of which a
        difference could overflow.
    """
    # half precision is slow to reduce and round on a CPU
    wide = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
    zero, top = wide.amin(axis, keepdim=True), wide.amax(axis, keepdim=True)
    limit = torch.finfo(numbers.dtype).max / 2
    if not bool(((zero >= -limit) & (top <= limit)).all()):  # false for NaN too
        bad = numbers[~(wide.abs() <= limit)]
        raise InfiniGenError(
            f"{bad.numel()} numbers of the {what} cannot be quantised, the first is "
            f"{bad[0].item()}: they must be finite and at most {limit:.4g}. The model overflowed "
            f"in {numbers.dtype}: load it in a wider dtype, or use codec='none'"
        )
    scale = _round_up((top - zero) / levels, numbers.dtype)
    # a scale of 0 has differences of 0 alone, so what divides them does not matter
    divisor = scale.to(wide.dtype).clamp_min(torch.finfo(wide.dtype).tiny)
    codes = (wide - zero).div_(divisor).round_().clamp_(max=levels)
    return codes.to(torch.uint8), scale, zero.to(numbers.dtype)


def _round_up(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The least numbers of ``dtype`` that are not below ``numbers``, which are not negative."""
    near = numbers.to(dtype)
    bits = near.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    return (bits + (near < numbers).to(bits.dtype)).view(dtype)


_CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (RawCodec, Int8Codec, Int4Codec)}
CODECS = tuple(_CODECS)


def codec_by_name(name: str) -> Codec:
    """The codec ``"none"``, ``"int8"`` or ``"int4"``.

    Raises
    ------
    InputError
        For another name.
    """
    if name not in _CODECS:
        raise InputError(f"codec={name!r} is not valid: it must be one of {', '.join(CODECS)}")
    return _CODECS[name]()
