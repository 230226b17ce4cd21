"""Demand paging: a pool whose home is a memory-mapped file, read on fault and never ahead."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from infinigen_kv.errors import CacheStateError
from infinigen_kv.rehearsal.select import Selection
from infinigen_kv.storage.homes.disk.layout import Bytes
from infinigen_kv.storage.link import Link
from infinigen_kv.storage.pools.pool import Pool
from infinigen_kv_lab.paging.mapped import PAGE, MappedArea, PagedMemory

SMALLEST = 256  # slots
GROWTH = 1.5


class PagingPool(Pool):
    """KV in a memory-mapped file, of which a share may be in memory: what CUDA's managed memory
    does for a cache that is larger than the card.

    Everything waits: a page is brought in when it is touched, while nothing else is computed. A
    fault is one transfer of one page over the link; a page that was written to goes back when it
    leaves. A scan of more than fits brings every page in again at each step, since the least
    recently used page leaves first.

    A step that attends to a selection reads a compact copy of it, in an area of its own, of which
    only the columns that changed are read from the home: the way H2O keeps its survivors. So a
    selection that fits in memory stays there.

    Parameters
    ----------
    keys, values
        Tensors like those to come, ``(B, H_kv, *, D)``.
    link
        Shared with the other layers; its pace is that of the faults.
    directory
        Where the file lies; None for the temporary directory.
    budget
        Share of the entries that may be in memory, in whole pages for each head and a page more,
        for the token that is being written.
    tokens
        To reserve.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        link: Link,
        *,
        directory: str | os.PathLike[str] | None,
        budget: float,
        tokens: int = 0,
    ) -> None:
        self._shape = keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3]
        self._dtype, self._device = keys.dtype, keys.device
        self._link = link
        self._budget = budget
        # over an emulated link the page cache stands for the home, and the pace for the way there
        self._memory = PagedMemory(directory, cold=link.pace is None)
        self._length = 0
        self._moved = 0  # pages in this call
        self._over = -math.inf  # when the last of them has arrived
        self._home = self._area(max(tokens, keys.shape[2], SMALLEST))
        self._wanted: Tensor | None = None
        self._compact: MappedArea | None = None
        self._held: Tensor | None = None  # slot of the entry in each column of the compact area

    @property
    def rows(self) -> int:
        return self._shape[0]

    @property
    def length(self) -> int:
        return self._length

    @property
    def home_bytes(self) -> int:
        return self._memory.nbytes

    @property
    def device_bytes(self) -> int:
        return self._memory.resident_bytes

    def append(self, keys: Tensor, values: Tensor) -> Tensor | None:
        started = time.perf_counter()
        entries = torch.cat([keys, values], dim=3).flatten(0, 1)  # (lines, Q, D + D_v)
        stop = self._length + keys.shape[2]
        self._reserve(stop)
        self._set_limit(stop)
        content = _bytes(entries)
        for line in range(self._lines):
            self._put(self._home, line, content[line], self._length)
        self._length = stop
        if content[0].nbytes > PAGE:
            self._memory.settle()
        self._finish(started)
        return None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        old = self._length
        if old == 0:
            self.append(keys, values)
            return keys, values, None
        all_keys, all_values = self._read_all(room=keys.shape[2])
        all_keys[:, :, old:], all_values[:, :, old:] = keys, values
        self.append(keys, values)
        return all_keys, all_values, None

    def prefetch(self, selection: Selection, rows: Sequence[bool] | None = None) -> None:
        """Only notes what is wanted: paging does not look ahead."""
        self._wanted = selection.index.squeeze(2).flatten(0, 1).cpu()  # (lines, n)

    def collect(self) -> tuple[Tensor, Tensor]:
        wanted, self._wanted = self._wanted, None
        assert wanted is not None
        started = time.perf_counter()
        area = self._compact_area(wanted)
        assert self._held is not None
        changed = wanted != self._held[:, : wanted.shape[1]]
        for line in range(self._lines):
            columns = changed[line].nonzero().squeeze(1)
            if len(columns):
                slots = wanted[line, columns].numpy()
                area.write_at(line, columns.numpy(), self._home.read_at(line, slots))
        self._held[:, : wanted.shape[1]] = wanted
        keys, values = self._read(area, wanted.shape[1])
        self._finish(started)
        return keys, values

    def all(self) -> tuple[Tensor, Tensor]:
        return self._read_all()

    def discard(self) -> None:
        self._wanted = None

    def forget_resident(self) -> None:
        if self._held is not None:
            self._held.fill_(-1)

    def truncate(self, length: int) -> None:
        self._length = max(0, min(self._length, length))
        if self._held is not None:
            self._held[self._held >= self._length] = -1

    def take_rows(self, index: Tensor) -> None:
        started = time.perf_counter()
        rows, heads = self._shape[:2]
        lines = torch.arange(rows * heads).view(rows, heads)[index.cpu()].flatten()
        old = self._home
        self._shape = len(index), *self._shape[1:]
        self._home = self._area(old.slots)
        self._set_limit(self._length)
        self._copy(old, self._home, lines.tolist())
        self._drop_compact()
        self._finish(started)

    def close(self) -> None:
        self._memory.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise CacheStateError("a cache in a paged file cannot be copied: read the prompt again")

    # Parts of the above.

    @property
    def _lines(self) -> int:
        return self._shape[0] * self._shape[1]

    @property
    def _entry_bytes(self) -> int:
        return (self._shape[2] + self._shape[3]) * self._dtype.itemsize

    def _area(self, slots: int) -> MappedArea:
        return self._memory.area(self._lines, slots, self._entry_bytes)

    def _set_limit(self, length: int) -> None:
        pages = self._home.pages(math.ceil(self._budget * length)) + 1
        self._memory.table.limit = self._lines * pages

    def _reserve(self, slots: int) -> None:
        if slots <= self._home.slots:
            return
        old = self._home
        self._home = self._area(max(slots, int(old.slots * GROWTH)))
        self._copy(old, self._home, list(range(self._lines)))

    def _copy(self, old: MappedArea, new: MappedArea, lines: list[int]) -> None:
        """Move the tokens to a new area whose line i is the old one's ``lines[i]``."""
        for line, source in enumerate(lines):
            for part in old.ranges(0, self._length):
                with old.reading(source, part) as entries:
                    new.write(line, part, entries, fresh=0)
        self._memory.remove(old)
        self._memory.settle()

    def _compact_area(self, wanted: Tensor) -> MappedArea:
        """Room for the columns of ``wanted`` ``(lines, n)``."""
        columns = wanted.shape[1]
        if self._compact is None or self._held is None or columns > self._compact.slots:
            self._drop_compact()
            self._compact = self._area(max(SMALLEST, int(columns * GROWTH)))
            self._held = torch.full((self._lines, self._compact.slots), -1)
        return self._compact

    def _drop_compact(self) -> None:
        if self._compact is not None:
            self._memory.remove(self._compact)
        self._compact = self._held = None

    def _put(self, area: MappedArea, line: int, entries: Bytes, first: int) -> None:
        for part in area.ranges(first, first + len(entries)):
            area.write(line, part, entries[part.start - first : part.stop - first], fresh=first)

    def _read_all(self, room: int = 0) -> tuple[Tensor, Tensor]:
        started = time.perf_counter()
        keys, values = self._read(self._home, self._length, room)
        self._finish(started)
        return keys, values

    def _read(self, area: MappedArea, slots: int, room: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values ``(B, H_kv, slots + room, D)`` of an area, without the last ``room``."""
        rows, heads, *dims = self._shape
        made = [torch.empty(rows * heads, slots + room, dim, dtype=self._dtype) for dim in dims]
        keys, values = (_bytes(each) for each in made)
        width = keys.shape[2]
        for line in range(self._lines):
            for part in area.ranges(0, slots):
                with area.reading(line, part) as entries:
                    keys[line, part], values[line, part] = entries[:, :width], entries[:, width:]
            self._charge()
        keys_out, values_out = (each.unflatten(0, (rows, heads)).to(self._device) for each in made)
        return keys_out, values_out

    def _charge(self) -> None:
        """Put the faults since the last time on the link's account, without waiting for them."""
        faults, statistics = self._memory.faults.take(), self._link.statistics
        moved = faults.read + faults.written
        self._moved += moved
        statistics.bytes_down += faults.read * PAGE
        statistics.bytes_up += faults.written * PAGE
        statistics.transfers += faults.read
        if self._link.pace is not None:
            for _ in range(moved):
                self._over = self._link.pace.book(PAGE)

    def _finish(self, started: float) -> None:
        """Let the faults since ``started`` take the time that they take on the link."""
        self._charge()
        moved, self._moved = self._moved, 0
        if moved == 0:
            return
        if self._link.pace is not None:
            self._link.pace.wait_until(self._over)
        elapsed = time.perf_counter() - started
        self._link.statistics.wait_seconds += elapsed
        self._link.statistics.transfer_seconds += elapsed


def _bytes(numbers: Tensor) -> Bytes:
    """The bytes of ``(..., n)`` numbers, sharing memory where they are on the host."""
    return numbers.contiguous().view(torch.uint8).cpu().numpy()
