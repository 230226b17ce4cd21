"""The resident set: entries of recent steps that stay on the device and need not move again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infinigen_kv.attention.entries import Entries

NEVER = -(2**40)  # the last use of an empty place


@dataclass(frozen=True, slots=True)
class Misses:
    """Entries that a step wants and the resident set lacks.

    ``slots`` and ``places`` are ``(B, H_kv, m)``: what to fetch, and where it goes. Heads that miss
    fewer than m entries are filled up with one of their slots and a place that nobody reads;
    ``count`` is the number of real ones.
    """

    slots: Tensor
    places: Tensor
    count: int


@dataclass(slots=True)
class Lookups:
    """Entries that steps wanted and that were on the device already, since the last reset."""

    wanted: int = 0
    hits: int = 0

    def reset(self) -> None:
        """Start to count anew."""
        self.wanted = self.hits = 0


class ResidentSet:
    """Device-side store of one layer's entries, per row and KV head, least recently used out first.

    Places 0 to ``budget - 1`` hold fetched entries; ``ring`` more hold the newest tokens, which the
    device has made itself, each until ``ring`` newer ones have come; one last, ``spare_place``,
    absorbs writes that are not valid and stands for "not here" in the map from slots to places.

    Parameters
    ----------
    keys, values
        Tensors like the entries' keys and values, ``(B, H_kv, *, D)``.
    budget, ring
        Fetched entries and newest tokens to keep per row and head, at least 1 each.
    capacity
        Slots to make room for in the map; see `reserve`.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, *, budget: int, ring: int, capacity: int = 0
    ) -> None:
        rows, heads = keys.shape[:2]
        self.budget = budget
        self.ring = ring
        self.spare_place = budget + ring
        places = self.spare_place + 1
        self._keys = keys.new_zeros(rows, heads, places, keys.shape[3])
        self._values = values.new_zeros(rows, heads, places, values.shape[3])
        self._place_of = _numbers((rows, heads, capacity + 1), self.spare_place, keys.device)
        self._slot_of = _numbers((rows, heads, places), -1, keys.device)
        self._used = _numbers((rows, heads, places), NEVER, keys.device)  # only read below `budget`
        self._clock = 0
        self._newest = 0
        self._head_offsets = _head_offsets(rows, heads, places, keys.device)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, the maps included."""
        return sum(
            tensor.nbytes
            for tensor in (self._keys, self._values, self._place_of, self._slot_of, self._used)
        )

    @property
    def slots(self) -> int:
        """Slots that the map has room for."""
        return self._place_of.shape[2] - 1

    def reserve(self, slots: int) -> None:
        """Make room in the map for slots below ``slots`` and a spare column, before their use."""
        rows, maps, columns = self._place_of.shape
        if slots + 1 > columns:
            grown = self._place_of.new_full(
                (rows, maps, max(slots + 1, columns * 3 // 2)), self.spare_place
            )
            grown[..., : columns - 1] = self._place_of[..., :-1]
            self._place_of = grown

    def look_up(self, slots: Tensor, valid: Tensor | None) -> tuple[Tensor, Misses | None]:
        """Find a step's entries, and make room for those that are not here.

        Parameters
        ----------
        slots
            ``(B, H_kv, n)``, distinct within a head and no more than ``budget``.
        valid
            Boolean, broadcastable to ``slots``: False for those that do not count; None for all.

        Returns
        -------
        places
            ``(B, H_kv, n)``: where each entry is, or will be once `fill` was given the misses.
        misses
            None if everything is here.
        """
        self._clock += 1
        places = self._place_of.gather(2, slots)
        missing = places == self.spare_place
        wanted = places
        if valid is not None:
            missing &= valid
            wanted = places.where(valid, self.spare_place)
        self._used.scatter_(2, wanted, self._clock)
        per_head = missing.sum(dim=2)
        most = int(per_head.max())
        if most == 0:
            return places, None
        misses = self._admit(slots, missing, per_head, most)
        return self._place_of.gather(2, slots), misses

    def fill(self, misses: Misses, keys: Tensor, values: Tensor) -> None:
        """Store fetched entries ``(B, H_kv, m, D)`` in the places that `look_up` made for them."""
        self._put(misses.places, keys, values)

    def forget(self, misses: Misses) -> None:
        """Undo what `look_up` did for entries that will not come."""
        slots = self._slot_of.gather(2, misses.places)
        self._set_place(slots, torch.full_like(slots, self.spare_place))
        self._slot_of.scatter_(2, misses.places, -1)
        self._used.scatter_(2, misses.places, NEVER)

    def in_place(self, places: Tensor) -> Entries:
        """As `gather`, without a copy where none is needed."""
        return Entries(self._keys, self._values, places)

    def gather(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``(B, H_kv, n, D)`` of a step's places ``(B, H_kv, n)``."""
        flat = (places + self._head_offsets).view(-1)
        rows, heads, count = places.shape
        keys = self._keys.flatten(0, 2).index_select(0, flat)
        values = self._values.flatten(0, 2).index_select(0, flat)
        return keys.view(rows, heads, count, -1), values.view(rows, heads, count, -1)

    def drop(self, slots: Tensor) -> None:
        """Forget what the slots ``(B, Q)`` held, since they are written anew; -1 are skipped."""
        rows, maps, columns = self._place_of.shape
        slots = slots[:, None].expand(rows, maps, -1)
        real = slots >= 0
        places = self._place_of.gather(2, slots.where(real, columns - 1))
        self._slot_of.scatter_(2, places.where(real, self.spare_place), -1)
        self._set_place(slots, torch.full_like(slots, self.spare_place))

    def add_new(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keep tokens that the device has just made; only the newest ``ring`` of them stay.

        ``slots`` ``(B, Q)``, -1 for tokens that were dropped at once; ``keys`` and ``values``
        ``(B, H_kv, Q, D)``.
        """
        count = min(slots.shape[1], self.ring)
        slots, keys, values = slots[:, -count:], keys[:, :, -count:], values[:, :, -count:]
        ring = (torch.arange(count, device=slots.device) + self._newest) % self.ring
        places = (ring + self.budget).expand(*self._slot_of.shape[:2], count)
        self._newest = (self._newest + count) % self.ring
        self.drop(slots)
        self._move_in(slots[:, None].expand_as(places), places)
        self._put(places, keys, values)

    def fill_resident(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Start over with entries of these slots ``(B, H_kv, n)``, the best first; -1 for none.

        At most ``budget`` of them stay, and the worst go first. ``keys`` and ``values`` are theirs,
        ``(B, H_kv, n, D)``.
        """
        self._slot_of[..., : self.budget] = -1
        self._used.fill_(NEVER)
        self._place_of.fill_(self.spare_place)
        newest = self._slot_of[..., self.budget : self.spare_place].contiguous()
        ring = torch.arange(self.budget, self.spare_place, device=slots.device).expand_as(newest)
        self._set_place(newest, ring)
        slots = slots[..., : self.budget]
        count = slots.shape[2]
        places = torch.arange(slots.shape[2], device=slots.device).expand_as(slots)
        skipped = self._place_of.gather(2, slots.clamp(min=0)) != self.spare_place  # in the ring
        skipped |= slots < 0
        self._move_in(slots.masked_fill(skipped, -1), places.masked_fill(skipped, self.spare_place))
        self._used.scatter_(2, places, (-places).masked_fill(skipped, NEVER))
        self._put(places, keys[:, :, :count], values[:, :, :count])

    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on."""
        self._place_of[..., length:] = self.spare_place
        stale = self._slot_of >= length
        self._slot_of.masked_fill_(stale, -1)
        self._used.masked_fill_(stale, NEVER)

    def take_rows(self, index: Tensor) -> None:
        """Become the batch rows ``index`` ``(n,)``, repeats allowed."""
        for name in ("_keys", "_values", "_place_of", "_slot_of", "_used"):
            held = getattr(self, name)
            setattr(self, name, held[index.to(held.device)])
        rows, heads, places, _ = self._keys.shape
        self._head_offsets = _head_offsets(rows, heads, places, self._keys.device)

    def _admit(self, slots: Tensor, missing: Tensor, per_head: Tensor, most: int) -> Misses:
        """Give the missing slots the places that were used longest ago."""
        wanted, real = marked_first(slots, missing, per_head, most)
        victims = self._used[..., : self.budget].topk(most, dim=2, largest=False).indices
        places = victims.where(real, self.spare_place)
        self._used.scatter_(2, places, self._clock)
        self._move_in(wanted.where(real, -1), places)
        return Misses(wanted.where(real, wanted[..., :1]), places, int(per_head.sum()))

    def _move_in(self, slots: Tensor, places: Tensor) -> None:
        """Point slots at places and back; who was there before is not here any more.

        ``slots`` of -1 go to the place ``spare_place`` and change nothing that is read.
        """
        former = self._slot_of.gather(2, places)
        self._set_place(former, torch.full_like(former, self.spare_place))
        self._slot_of.scatter_(2, places, slots)
        self._set_place(slots, places)

    def _set_place(self, slots: Tensor, places: Tensor) -> None:
        """``place_of[slots] = places`` for real slots; -1 are skipped."""
        spare = self._place_of.shape[2] - 1  # one column more than slots, see `reserve`
        self._place_of.scatter_(2, slots.where(slots >= 0, spare), places)

    def _put(self, places: Tensor, keys: Tensor, values: Tensor) -> None:
        flat = (places + self._head_offsets).reshape(-1)
        self._keys.view(-1, self._keys.shape[3])[flat] = keys.reshape(-1, keys.shape[3])
        self._values.view(-1, self._values.shape[3])[flat] = values.reshape(-1, values.shape[3])


def marked_first(
    slots: Tensor, chosen: Tensor, per_head: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """The chosen ones of ``slots`` first, ``(B, H, most)``, and which of these are chosen ones."""
    columns = chosen.to(torch.uint8).topk(most, dim=2).indices
    real = torch.arange(most, device=slots.device) < per_head.unsqueeze(2)
    return slots.gather(2, columns), real


def _numbers(shape: tuple[int, int, int], value: int, device: torch.device) -> Tensor:
    return torch.full(shape, value, dtype=torch.long, device=device)


def _head_offsets(rows: int, heads: int, places: int, device: torch.device) -> Tensor:
    return (torch.arange(rows * heads, device=device) * places).view(rows, heads, 1)
