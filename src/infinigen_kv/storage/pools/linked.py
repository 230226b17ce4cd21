"""A pool whose home is apart from the device: entries cross a link, unless they are resident."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from infinigen_kv.attention.entries import Entries
from infinigen_kv.errors import HomeError
from infinigen_kv.rehearsal.select import Selection
from infinigen_kv.storage.homes.capped import CappedHome
from infinigen_kv.storage.homes.packed import FullReading, PackedHome, Reading
from infinigen_kv.storage.homes.row_slots import RowSlots
from infinigen_kv.storage.homes.slots import Eviction
from infinigen_kv.storage.link import Link, Transfer
from infinigen_kv.storage.pools.pool import Pool
from infinigen_kv.storage.pools.resident import Lookups, Misses, ResidentSet

LIKELY = 5  # a fifth of a limited home is named as likely to be wanted after a prompt
RING = 64  # newest tokens that stay on the device, where there is a resident set


@dataclass(frozen=True, slots=True)
class _Fetch:
    """Entries under way. ``places`` and ``misses`` where they go through the resident set."""

    reading: Reading | FullReading | None
    transfer: Transfer | None
    places: Tensor | None = None
    misses: Misses | None = None
    everything: bool = False


class LinkedPool(Pool):
    """A packed home, a link and, with a budget, a resident set.

    Parameters
    ----------
    home
        Where all entries are; a `CappedHome` where ``eviction`` is given.
    link
        Shared with the other layers.
    resident
        Fetched entries to keep per row and head, as far as there are so many; 0 moves every
        selected entry, as in the paper.
    eviction
        What makes room in a capped home.
    sinks
        First real tokens of each row that a capped home never evicts.
    resident_kind
        Who does the resident set's bookkeeping (`kernels.base.Kernels.resident_set`).
    """

    def __init__(
        self,
        home: PackedHome,
        link: Link,
        *,
        resident: int = 0,
        eviction: Eviction | None = None,
        sinks: int = 0,
        resident_kind: type[ResidentSet] = ResidentSet,
    ) -> None:
        self.lookups = Lookups()
        self._home = home
        self._link = link
        self._budget = resident
        self._kind = resident_kind
        self._resident: ResidentSet | None = None
        self._fetch: _Fetch | None = None
        self._slots: RowSlots | None = None
        if eviction is not None:
            assert isinstance(home, CappedHome)
            self._slots = RowSlots(home.rows, home.capacity, eviction, sinks=sinks)

    @property
    def rows(self) -> int:
        return self._home.rows

    @property
    def length(self) -> int:
        return self._home.length if self._slots is None else self._slots.tokens_seen

    @property
    def home_bytes(self) -> int:
        return self._home.nbytes

    @property
    def device_bytes(self) -> int:
        kept = 0 if self._resident is None else self._resident.nbytes
        return kept + self._home.side_bytes

    @property
    def resident_budget(self) -> int:
        budget = min(self._budget, self._places)
        return budget if self._slots is None else max(budget, self._slots.capacity // LIKELY)

    @property
    def free(self) -> int | None:
        return None if self._slots is None else self._slots.free

    @property
    def sinks(self) -> int:
        return 0 if self._slots is None else self._slots.sinks

    def set_padding(self, padding: Sequence[int]) -> None:
        if self._slots is not None:
            self._slots.set_padding(padding)

    @property
    def positions(self) -> Tensor | None:
        positions = None if self._slots is None else self._slots.positions
        return None if positions is None else positions.to(self._home.device)

    def append(self, keys: Tensor, values: Tensor) -> Tensor | None:
        count = keys.shape[2]
        slots = None
        if self._slots is None:
            self._home.append(keys, values)
        else:
            assert isinstance(self._home, CappedHome)
            # First, so that after a failed write the lengths tell that slots may be overwritten.
            if count > 1 and self.length:
                self._slots.remember()
            slots = self._slots.add(count)
            self._home.write(slots, keys, values)
        entry = self._home.store.entry_bytes
        self._link.sent(keys.shape[0] * keys.shape[1] * count * entry)
        if self._budget:
            self._keep_new(slots, keys, values)
        return slots

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.length == 0:
            return keys, values, self.append(keys, values)
        old_keys, old_values = self._collect_all()
        slots = self.append(keys, values)
        return (
            torch.cat([old_keys, keys], dim=2),
            torch.cat([old_values, values], dim=2),
            slots,
        )

    def prefetch(self, selection: Selection, rows: Sequence[bool] | None = None) -> None:
        self.discard()
        slots = selection.index.squeeze(2)
        valid, wanted = selection.valid_columns()
        self.lookups.wanted += wanted
        if self._slots is not None:
            self._slots.touch(slots, valid, rows)
        if self._resident is None or slots.shape[2] > self._resident.budget:
            self._fetch = self._start(slots, wanted)
            return
        places, misses = self._resident.look_up(slots, valid)
        self.lookups.hits += wanted - (misses.count if misses else 0)
        if misses is None:
            self._fetch = _Fetch(None, None, places)
            return
        try:
            started = self._start(misses.slots, misses.count)
        except BaseException:
            self._resident.forget(misses)
            raise
        self._fetch = _Fetch(started.reading, started.transfer, places, misses)

    def collect(self) -> tuple[Tensor, Tensor]:
        return self.collect_in_place().gather()

    def collect_in_place(self) -> Entries:
        fetch, self._fetch = self._fetch, None
        assert fetch is not None
        if fetch.places is None:
            return Entries(*self._finish(fetch), None)
        assert self._resident is not None
        if fetch.misses is not None:
            try:
                self._resident.fill(fetch.misses, *self._finish(fetch))
            except BaseException:
                self._resident.forget(fetch.misses)
                raise
        return self._resident.in_place(fetch.places)

    def prefetch_all(self) -> None:
        if self._fetch is None and self.length:
            self._fetch = self._start_all()

    def all(self) -> tuple[Tensor, Tensor]:
        return self._finish(self._start_all())

    def discard(self) -> None:
        fetch, self._fetch = self._fetch, None
        if fetch is None:
            return
        try:
            if fetch.transfer is not None:
                with suppress(HomeError):  # nobody wants what could not be read
                    fetch.transfer.wait()
        finally:
            if fetch.misses is not None and self._resident is not None:
                self._resident.forget(fetch.misses)

    def forget_resident(self) -> None:
        self._resident = None

    def fill_resident(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        if self._slots is not None:  # so that the first victims are others
            best = slots[..., : self._slots.capacity // LIKELY]  # whatever the resident set holds
            self._slots.touch(best, best >= 0)
            self._slots.remember()
        if self._budget == 0 or slots.shape[2] == 0:
            return
        self._resident_set(keys, values).fill_resident(slots, keys, values)

    def truncate(self, length: int) -> None:
        self.discard()
        if self._slots is not None:
            self._slots.truncate(length)
        self._home.truncate(length)
        if self._resident is not None:
            self._resident.truncate(length)

    def take_rows(self, index: Tensor) -> None:
        self.discard()
        self._home.take_rows(index)
        if self._resident is not None:
            self._resident.take_rows(index)
        if self._slots is not None:
            self._slots.take_rows(index)

    def close(self) -> None:
        self._fetch = None
        self._home.close()

    # Parts of the above.

    def _collect_all(self) -> tuple[Tensor, Tensor]:
        if self._fetch is None or not self._fetch.everything:
            self.discard()
            self._fetch = self._start_all()
        fetch, self._fetch = self._fetch, None
        return self._finish(fetch)

    def _start(self, slots: Tensor, entries: int) -> _Fetch:
        reading = self._home.prepare(slots)
        if reading.slots.shape[2] == 0:
            return _Fetch(reading, None)
        if reading.overlay is not None:
            entries = max(0, entries - reading.overlay.lines.numel())
        return _Fetch(reading, self._link.fetch(self._home.store, reading.slots, entries))

    def _start_all(self) -> _Fetch:
        reading = self._home.prepare_all()
        store = self._home.store
        if reading.slots is None:
            transfer = self._link.fetch_all(store)
        else:
            transfer = self._link.fetch(store, reading.slots, reading.slots.numel())
        return _Fetch(reading, transfer, everything=True)

    def _finish(self, fetch: _Fetch) -> tuple[Tensor, Tensor]:
        assert fetch.reading is not None
        entries = torch.empty(0) if fetch.transfer is None else fetch.transfer.wait()
        return fetch.reading.decode(entries.to(self._home.device))

    def _keep_new(self, slots: Tensor | None, keys: Tensor, values: Tensor) -> None:
        count = min(keys.shape[2], RING)
        keys, values = keys[:, :, -count:], values[:, :, -count:]
        resident = self._resident_set(keys, values)
        if slots is None:
            newest = torch.arange(self._home.length - count, self._home.length, device=keys.device)
            resident.add_new(newest.expand(self.rows, -1), keys, values)
        else:
            slots = slots.to(keys.device)
            resident.drop(slots)
            resident.add_new(slots[:, -count:], keys, values)

    def _resident_set(self, keys: Tensor, values: Tensor) -> ResidentSet:
        """With room for the home's tokens; made for ``keys`` and ``values`` if there is none."""
        if self._resident is None or self._resident.slots < self._places:
            self._resident = self._roomy(self._resident, self._places, keys, values)
        return self._resident

    @property
    def _places(self) -> int:
        """Tokens per row that the home has room for."""
        return max(self._home.length, self._home.reserved)

    @torch.inference_mode(False)  # what that makes may be written to outside of it later
    def _roomy(
        self, held: ResidentSet | None, slots: int, keys: Tensor, values: Tensor
    ) -> ResidentSet:
        if held is None or held.budget < min(self._budget, slots):
            # with more places than before; what it held is at home
            room = slots if held is None else max(slots, held.slots * 3 // 2)
            budget = min(self._budget, room)
            return self._kind(keys, values, budget=budget, ring=RING, capacity=room)
        held.reserve(slots)
        return held
