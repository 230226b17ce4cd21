"""A home whose entries are packed by a codec and kept in a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from infinigen_kv.errors import InputError
from infinigen_kv.storage.homes.buffer import TokenBuffer
from infinigen_kv.storage.homes.codec import Codec, EntryShape
from infinigen_kv.storage.homes.store import Store

CHUNK = 1024  # tokens packed at once; bounds what a long prompt needs on top of its entries

StoreMaker = Callable[[int, int, int, int], Store]
"""Makes an empty store for so many rows, heads, bytes of an entry, and tokens to reserve."""


class Overlay(NamedTuple):
    """Tokens in full precision among the slots of a reading.

    ``mask`` ``(B, H_kv, n, 1)`` says which, ``lines`` ``(m,)`` are their places in ``mask``
    flattened, and ``numbers`` ``(m, D + D_v)`` their keys and values.
    """

    mask: Tensor
    lines: Tensor
    numbers: Tensor


@dataclass(frozen=True, slots=True)
class Reading:
    """A read from a home, split where a link comes in: move ``slots``, then `decode` the entries.

    What is on the device was taken when the reading was prepared, so tokens that arrive until the
    entries have change nothing.

    Parameters
    ----------
    slots
        ``(B, H_kv, n)``: what to read from the store; n is 0 where the store is empty.
    """

    slots: Tensor
    codec: Codec
    shape: EntryShape
    scales: Tensor | None
    overlay: Overlay | None

    def decode(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the slots asked for; ``entries`` ``(B, H_kv, n, E)`` on the device."""
        if self.overlay is None:
            return self.codec.decode(entries, self.scales, self.shape)
        widths = self.shape.dim, self.shape.value_dim
        if self.slots.shape[2] == 0:
            numbers = self.overlay.numbers.view(*self.overlay.mask.shape[:3], sum(widths))
            keys, values = numbers.split(widths, dim=-1)
            return keys, values
        keys, values = self.codec.decode(entries, self.scales, self.shape)
        new_keys, new_values = self.overlay.numbers.split(widths, dim=-1)
        # few of many: on a CPU far cheaper than `torch.where` over all
        keys.view(-1, widths[0]).index_copy_(0, self.overlay.lines, new_keys)
        values.view(-1, widths[1]).index_copy_(0, self.overlay.lines, new_values)
        return keys, values


@dataclass(frozen=True, slots=True)
class FullReading:
    """As `Reading`, for all tokens: move the whole store."""

    codec: Codec
    shape: EntryShape
    scales: Tensor | None
    tail: Tensor
    slots: None = None

    def decode(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values ``(B, H_kv, T, D)``; ``entries`` ``(B, H_kv, stored, E)``."""
        if self.scales is None:
            return self.codec.decode(entries, None, self.shape)
        new_keys, new_values = self.tail.split((self.shape.dim, self.shape.value_dim), dim=-1)
        if entries.shape[2] == 0:
            return new_keys, new_values
        groups = entries.unflatten(2, (-1, self.codec.group))
        keys, values = self.codec.decode(groups, self.scales.unsqueeze(3), self.shape)
        return (
            torch.cat([keys.flatten(2, 3), new_keys], dim=2),
            torch.cat([values.flatten(2, 3), new_values], dim=2),
        )


class PackedHome:
    """KV of one layer: whole groups of tokens packed in a store, and the rest, fewer than a group,
    in full precision in the tail on the device.

    A link reads `store` itself, between `prepare` and `Reading.decode`.

    Parameters
    ----------
    keys, values
        Tensors like those to come, ``(B, H_kv, *, D)``, for their shape, dtype and device.
    codec
        Packs the tokens.
    make_store
        For example `RamStore`.
    capacity
        Tokens to reserve.

    Raises
    ------
    InputError
        Where keys and values differ in dtype.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        codec: Codec,
        make_store: StoreMaker,
        capacity: int = 0,
    ) -> None:
        if keys.dtype != values.dtype:
            raise InputError(
                f"keys are {keys.dtype} and values {values.dtype}: a packed home needs one dtype "
                "for both; load the model in one dtype"
            )
        rows, heads, _, dim = keys.shape
        self.codec = codec
        self.shape = EntryShape(dim, values.shape[3], keys.dtype)
        self.store = make_store(rows, heads, codec.entry_bytes(self.shape), capacity)
        self.reserved = capacity  # tokens per row
        width = dim + values.shape[3]
        self._tail = keys.new_zeros(rows, heads, codec.group if self._grouped else 0, width)
        self._tail_length = 0
        self._scales = TokenBuffer(
            rows,
            heads,
            2 * dim if self._grouped else 0,
            dtype=keys.dtype,
            device=keys.device,
            capacity=capacity // codec.group,
        )

    @property
    def rows(self) -> int:
        return self.store.rows

    @property
    def length(self) -> int:
        return self.stored_length + self._tail_length

    @property
    def device(self) -> torch.device:
        """Where the keys and values are made and used."""
        return self._tail.device

    @property
    def stored_length(self) -> int:
        """Tokens in the store, the first ones; the others are in the tail."""
        return self.store.length

    @property
    def nbytes(self) -> int:
        return self.store.nbytes

    @property
    def side_bytes(self) -> int:
        """Bytes on the device: scales of the keys, and the tail."""
        return self._scales.nbytes + self._tail.nbytes

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens; where one cannot be packed or stored, none is added."""
        group, held = self.codec.group, self._tail_length
        taken = (held + keys.shape[2]) // group * group - held  # new tokens to be packed
        if taken > 0:
            new = keys[:, :, :taken], values[:, :, :taken]
            if held:
                old = self._tail[:, :, :held].split((self.shape.dim, self.shape.value_dim), dim=-1)
                new = torch.cat([old[0], new[0]], dim=2), torch.cat([old[1], new[1]], dim=2)
            self._pack(*new)
            self._tail_length = 0
            keys, values = keys[:, :, taken:], values[:, :, taken:]
        self._extend_tail(keys, values)

    def prepare(self, slots: Tensor) -> Reading:
        """Read all that is on the device about the slots ``(B, H_kv, n)``."""
        if not self._grouped:
            return Reading(slots, self.codec, self.shape, None, None)
        overlay = None
        stored = self.store.length
        if self._tail_length:
            overlay = self._overlay(self._tail_places(slots))
            slots = slots.clamp(max=stored - 1) if stored else slots[..., :0]
        scales = self._scales.gather(self._groups(slots))
        return Reading(slots, self.codec, self.shape, scales, overlay)

    def prepare_all(self) -> Reading | FullReading:
        """As `prepare`, for all tokens; where ``slots`` are None, move the whole store."""
        tail = self._tail[:, :, : self._tail_length].clone()
        scales = self._scales.view() if self._grouped else None
        return FullReading(self.codec, self.shape, scales, tail)

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self._read(self.prepare(slots))

    def all(self) -> tuple[Tensor, Tensor]:
        return self._read(self.prepare_all())

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on.

        A group of which some tokens stay returns to the tail, as the codec has left it.
        """
        length, stored, group = max(0, length), self.store.length, self.codec.group
        if length >= stored:
            self._tail_length = min(self._tail_length, length - stored)
            return
        whole = length // group
        rest = torch.arange(whole * group, length, device=self._tail.device)
        kept = self.gather(rest.expand(*self._tail.shape[:2], -1)) if len(rest) else None
        self.store.truncate(whole * group)
        self._scales.truncate(whole)
        self._tail_length = 0
        if kept is not None:
            self._extend_tail(*kept)

    def take_rows(self, index: Tensor) -> None:
        self.store.take_rows(index)
        self._scales.take_rows(index)
        self._tail = self._tail[index.to(self._tail.device)]

    def close(self) -> None:
        """Release what the store holds; may be called twice."""
        self.store.close()

    @property
    def _grouped(self) -> bool:
        return self.codec.group > 1

    def _groups(self, slots: Tensor) -> Tensor:
        """Which group's scales the keys in stored slots have."""
        return slots // self.codec.group

    def _tail_places(self, slots: Tensor) -> Tensor:
        """Places in the tail; negative for stored slots."""
        return slots - self.store.length

    def _overlay(self, places: Tensor) -> Overlay:
        """What the tail holds at ``places`` ``(B, H_kv, n)`` that are not negative."""
        group, width = self._tail.shape[2:]
        mask = places >= 0
        lines = mask.flatten().nonzero().squeeze(1)
        head = lines // places.shape[2]
        found = head * group + places.flatten()[lines]
        return Overlay(mask.unsqueeze(-1), lines, self._tail.view(-1, width)[found])

    def _read(self, reading: Reading | FullReading) -> tuple[Tensor, Tensor]:
        slots = reading.slots
        entries = self.store.read_all() if slots is None else self.store.read(slots)
        return reading.decode(entries.to(self._tail.device))

    def _extend_tail(self, keys: Tensor, values: Tensor) -> None:
        if keys.shape[2] == 0:
            return
        start = self._tail_length
        self._tail_length = start + keys.shape[2]
        place = self._tail[:, :, start : self._tail_length]
        place[..., : self.shape.dim] = keys
        place[..., self.shape.dim :] = values

    def _pack(self, keys: Tensor, values: Tensor) -> None:
        """Move whole groups into the store, or none of them."""
        stored, groups = self.store.length, self._scales.length
        try:
            for start in range(0, keys.shape[2], CHUNK):
                chunk = slice(start, start + CHUNK)
                packed = self.codec.encode(keys[:, :, chunk], values[:, :, chunk])
                self.store.append(packed.entries)
                if packed.scales is not None:
                    self._scales.extend(packed.scales.shape[2]).copy_(packed.scales)
        except BaseException:
            self.store.truncate(stored)
            self._scales.truncate(groups)
            raise
