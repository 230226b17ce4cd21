"""A packed home of limited size, in which a new token may take another one's slot."""

from __future__ import annotations

import torch
from torch import Tensor

from infinigen_kv.errors import CacheStateError
from infinigen_kv.storage.homes.codec import Codec, Packed
from infinigen_kv.storage.homes.packed import CHUNK, FullReading, PackedHome, Reading, StoreMaker


class CappedHome(PackedHome):
    """At most ``capacity`` tokens; `storage.homes.slots.SlotMap` says which slots new tokens take.

    Tokens are packed in groups of consecutive arrivals as in `PackedHome`, and then go to slots
    anywhere. So each slot knows the group whose scales its key has, or its place in the tail.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        codec: Codec,
        make_store: StoreMaker,
        capacity: int,
    ) -> None:
        super().__init__(keys, values, codec, make_store, capacity)
        self.capacity = capacity
        self._length = 0
        self._overwritten = False
        # A group, or for a token in the tail ~place. The spare last column is for tokens that have
        # no slot.
        self._where = torch.zeros(self.rows, capacity + 1, dtype=torch.long, device=keys.device)
        self._tail_slots = torch.empty(self.rows, 0, dtype=torch.long, device=keys.device)

    @property
    def length(self) -> int:
        return self._length

    @property
    def stored_length(self) -> int:
        """Slots whose token is in the store, at least; those in the tail may be any."""
        return max(0, self._length - self._tail_length)

    @property
    def side_bytes(self) -> int:
        return super().side_bytes + self._where.nbytes

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens in new slots, which must be free."""
        slots = torch.arange(self._length, self._length + keys.shape[2])
        self.write(slots.expand(self.rows, -1), keys, values)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put new tokens, ``(B, H_kv, Q, D)``, into ``slots`` ``(B, Q)``.

        New slots follow those in use; no slot twice in a row. A token with slot -1 is dropped.
        """
        slots = slots.to(self._where.device)
        kept = (slots >= 0).any(dim=0)
        overwriting = not bool(kept.all())  # from then on positions are not slots
        if overwriting:
            slots, keys, values = slots[:, kept], keys[:, :, kept], values[:, :, kept]
        if slots.numel() == 0:
            return
        held = self._tail_length
        tail_slots = self._tail_slots
        if held:
            taken = (tail_slots.unsqueeze(2) == slots.unsqueeze(1)).any(dim=2)
            tail_slots = tail_slots.masked_fill(taken, -1)
        overwriting |= int(slots.min()) < self._length
        slots = torch.cat([tail_slots, slots], dim=1)
        if held:
            old = self._tail[:, :, :held].split((self.shape.dim, self.shape.value_dim), dim=-1)
            keys, values = torch.cat([old[0], keys], dim=2), torch.cat([old[1], values], dim=2)
        ready = slots.shape[1] // self.codec.group * self.codec.group
        if ready:
            self._pack_into(slots[:, :ready], keys[:, :, :ready], values[:, :, :ready])
        self._overwritten |= overwriting
        self._length = max(self._length, int(slots.max()) + 1)
        self._tail_length = 0
        self._extend_tail(keys[:, :, ready:], values[:, :, ready:])
        self._tail_slots = slots[:, ready:]
        self._note(self._tail_slots, ~torch.arange(self._tail_length, device=slots.device))

    def prepare_all(self) -> Reading | FullReading:
        if not self._grouped:
            return super().prepare_all()
        slots = torch.arange(self._length, device=self._where.device)
        return self.prepare(slots.expand(*self._tail.shape[:2], -1))

    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on.

        Raises
        ------
        CacheStateError
            Where slots were given to new tokens, so that the order of arrival is lost. All tokens
            can always be forgotten.
        """
        length = max(0, length)
        if length >= self._length:
            return
        if length and self._overwritten:
            raise CacheStateError(
                f"cannot go back to {length} tokens, since tokens were evicted at a capacity of "
                f"{self.capacity}: start again with an empty cache, or set no capacity"
            )
        super().truncate(length)
        self._overwritten = False
        self._length = length
        places = torch.arange(self._tail_length, device=self._where.device)
        self._tail_slots = (places + self.store.length).expand(self.rows, -1)
        self._note(self._tail_slots, ~places)

    def take_rows(self, index: Tensor) -> None:
        super().take_rows(index)
        index = index.to(self._where.device)
        self._where, self._tail_slots = self._where[index], self._tail_slots[index]

    def _groups(self, slots: Tensor) -> Tensor:
        return self._look_up(slots).clamp(min=0)

    def _tail_places(self, slots: Tensor) -> Tensor:
        return ~self._look_up(slots)

    def _look_up(self, slots: Tensor) -> Tensor:
        return self._where.gather(1, slots.flatten(1)).view(slots.shape)

    def _note(self, slots: Tensor, where: Tensor) -> None:
        """Set ``where`` ``(B or 1, Q)`` of ``slots`` ``(B, Q)``."""
        slots = slots.masked_fill(slots < 0, self.capacity)
        self._where.scatter_(1, slots, where.expand(slots.shape))

    def _pack_into(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Move whole groups into slots of the store; where one cannot be packed, none."""
        packed = [
            self.codec.encode(
                keys[:, :, start : start + CHUNK], values[:, :, start : start + CHUNK]
            )
            for start in range(0, keys.shape[2], CHUNK)
        ]
        for chunk, part in zip(slots.split(CHUNK, dim=1), packed, strict=True):
            self._put(chunk, part)

    def _put(self, slots: Tensor, packed: Packed) -> None:
        stored, count = self.store.length, slots.shape[1]
        following = torch.arange(stored, stored + count, device=slots.device)
        if bool((slots == following).all()):
            self.store.append(packed.entries)
        else:
            self._make_slots(int(slots.max()) + 1)
            self.store.write(slots.to("cpu"), packed.entries.to("cpu"))
        if packed.scales is None:
            return
        groups = self._free_groups(packed.scales.shape[2])
        rows = torch.arange(self.rows, device=slots.device).unsqueeze(1)
        self._scales.view()[rows, :, groups] = packed.scales.transpose(1, 2)
        self._note(slots, groups.repeat_interleave(self.codec.group, dim=1))

    def _make_slots(self, length: int) -> None:
        """Let the store have ``length`` slots, the new ones unwritten."""
        missing = length - self.store.length
        if missing > 0:
            shape = self.rows, self._tail.shape[1], missing, self.store.entry_bytes
            self.store.append(torch.zeros(shape, dtype=torch.uint8))

    def _free_groups(self, count: int) -> Tensor:
        """Groups ``(B, count)`` whose scales no slot needs; all new while there are few."""
        start = self._scales.length
        if start >= count and start + count > 2 * self.capacity // self.codec.group:
            needed = torch.zeros(self.rows, start, dtype=torch.uint8, device=self._where.device)
            needed.scatter_(1, self._where[:, :-1].clamp(min=0), 1)
            if count <= int((needed == 0).sum(dim=1).min()):
                return needed.argsort(dim=1)[:, :count]
        self._scales.extend(count)
        groups = torch.arange(start, start + count, device=self._where.device)
        return groups.expand(self.rows, -1)
