"""The store of a disk home: packed entries of one layer in a file.

Only complete groups of tokens (see `Layout`) go to the disk; the tokens of each batch row's last,
incomplete group, its tail, stay in memory.
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from infinigen_kv.storage.homes.disk.extents import Change, Extents
from infinigen_kv.storage.homes.disk.file import DiskFile
from infinigen_kv.storage.homes.disk.jobs import DiskRead, settle
from infinigen_kv.storage.homes.disk.layout import Bytes, Indices, Layout, entries_at
from infinigen_kv.storage.homes.disk.scratch import aligned

STAGE = 4 * 1024 * 1024  # bytes of a long append that one write behind the computation takes
LONGEST = 1024 * 1024  # bytes; a longer read is cut, so that several threads share it


class DiskStore:
    """Packed entries of one layer in a `DiskFile`; see `storage.homes.store.Store`.

    One thread at a time may call it. A read that was started returns what the slots held then,
    whatever is appended or written before it is awaited.

    Parameters
    ----------
    file
        Shared with the other layers of the cache; whoever opened it closes it, after the stores.
    rows, heads, entry_bytes
        B, H_kv and E.
    capacity
        Tokens to reserve at once.

    Raises
    ------
    HomeError
        The disk is full. Every other call raises it too when the disk fails; after a failed write
        behind the computation, each later call does.
    """

    def __init__(
        self, file: DiskFile, rows: int, heads: int, entry_bytes: int, capacity: int = 0
    ) -> None:
        self.file = file
        self.heads = heads
        self.entry_bytes = entry_bytes
        self.length = 0
        self.layout = Layout.of(heads * entry_bytes)
        self.bytes_read = 0
        """Bytes asked of the disk so far, the unwanted parts of blocks and gaps included."""
        self.reads = 0
        """Positional reads so far."""
        self._extents = Extents(file, self.layout, rows)
        self._head_starts = np.arange(heads)[:, None] * entry_bytes
        self._tail = self._new_groups(1)
        self._writing: list[Future[None]] = []
        self._reading: list[Future[None]] = []
        file.check()
        self._extents.reserve(capacity)

    @property
    def rows(self) -> int:
        return self._extents.rows

    @property
    def nbytes(self) -> int:
        return self._extents.nbytes

    def append(self, entries: Tensor) -> None:
        tokens = _bytes(entries).transpose(0, 2, 1, 3)  # (B, Q, H_kv, E)
        assert tokens.shape[2:] == (self.heads, self.entry_bytes)
        count, per_group = tokens.shape[1], self.layout.group_tokens
        self.file.check()
        self._extents.reserve(self.length + count)
        group, used = divmod(self.length, per_group)
        first = min(per_group - used, count) if used else 0
        self._in_tail(used, first)[...] = tokens[:, :first]
        tail = self._tail
        if used and used + first == per_group:
            self._write(self._tail, group)
            tail, group = self._new_groups(1), group + 1
        rest = (count - first) % per_group
        self._write_groups(tokens[:, first : count - rest], group)
        # Only now, so that a failure above leaves the store as it was.
        self._tail = tail
        self.length += count
        if count > first:
            self._in_tail(0, rest)[...] = tokens[:, count - rest :]

    def write(self, slots: Tensor, entries: Tensor) -> None:
        """Overwrite slots ``(B, Q)`` with ``(B, H_kv, Q, E)``; a slot of -1 is skipped. On the disk
        each is a group read, changed and written back, behind the computation.

        Raises
        ------
        IndexError
            A slot is not in use.
        """
        # Reads in flight are to return the old entries, and a group's earlier write comes first.
        self._quiesce()
        given = _slots(slots)
        self._check_slots(given, lowest=-1)
        rows, places = np.nonzero(given >= 0)
        slot = given[rows, places]
        inside = slot % self.layout.group_tokens
        tokens = _bytes(entries)[rows, :, places].reshape(len(rows), self.layout.token_bytes)
        in_tail = slot >= self._on_disk
        tail = self.layout.tokens(self._tail)[:, 0]
        tail[rows[in_tail], inside[in_tail]] = tokens[in_tail]
        groups = self._extents.addresses(rows, slot - inside)
        changes: dict[int, Change] = {}
        for item in np.flatnonzero(~in_tail).tolist():
            offset = int(groups[item])
            change = changes.setdefault(offset, Change(offset, [], []))
            change.places.append(int(inside[item]))
            change.items.append(item)
        if changes:
            self._writing += self._extents.overwrite(list(changes.values()), tokens)

    def read(self, slots: Tensor) -> Tensor:
        return self.start_read(slots).wait()

    def start_read(self, slots: Tensor) -> DiskRead:
        """Start to read the slots ``(B, H_kv, n)``; a block that several heads want is read once.

        Raises
        ------
        IndexError
            A slot is not in use.
        """
        wanted = _slots(slots)
        self._settle_writes()
        self._check_slots(wanted, lowest=0)
        pieces, buffer, places = self._plan(wanted)
        batch = self.file.start(self.file.read, pieces, buffer.nbytes)
        self._reading += batch.futures
        return DiskRead(
            batch, lambda: torch.from_numpy(entries_at(buffer, places, self.entry_bytes))
        )

    def read_all(self) -> Tensor:
        return self.start_read_all().wait()

    def start_read_all(self) -> DiskRead:
        """Start to read all entries ``(B, H_kv, T, E)``, in long reads, into new memory."""
        self._settle_writes()
        shape = self.rows, self.heads, self.length, self.entry_bytes
        everything = np.empty(shape, dtype=np.uint8)
        tail = self._in_tail(0, self.length - self._on_disk)
        everything[:, :, self._on_disk :] = tail.transpose(0, 2, 1, 3)

        def work(target: Bytes, offset: int) -> None:
            groups = aligned(target.shape[0] * self.layout.group_bytes)
            self.file.read(groups, offset)
            tokens = self.layout.tokens(groups.reshape(-1, self.layout.group_bytes))
            target[...] = tokens.reshape(target.shape)

        on_disk = self._on_disk // self.layout.group_tokens
        pieces = [
            (self._groups_of(everything[row], span.first, span.groups), span.offset)
            for row, span in self._extents.spans(0, on_disk)
        ]
        self._count(len(pieces), self.rows * on_disk * self.layout.group_bytes)
        batch = self.file.start(work, pieces, everything.nbytes)
        self._reading += batch.futures
        return DiskRead(batch, lambda: torch.from_numpy(everything))

    def truncate(self, length: int) -> None:
        if length >= self.length:
            return
        length = max(0, length)
        self._quiesce()
        group, used = divmod(length, self.layout.group_tokens)
        if length < self._on_disk and used:
            tail = self._new_groups(1)
            self._extents.load(tail[:, 0], group)
            self._tail = tail
        self.length = length

    def take_rows(self, index: Tensor) -> None:
        """Become the batch rows ``index`` ``(n,)``. Rows that occur once only change their place;
        each repeat copies a row on the disk, which is slow.
        """
        self._quiesce()
        chosen = index.tolist()
        self._extents.take_rows(chosen, self._on_disk // self.layout.group_tokens)
        kept = self._tail[chosen]
        self._tail = self._new_groups(1)
        self._tail[...] = kept

    def flush(self) -> None:
        """Wait until the complete groups are on the disk; raises `HomeError` if a write failed."""
        self._settle_writes()

    def close(self) -> None:
        """Give the space back to the file, once nothing reads or writes it; raises nothing."""
        settle([*self._reading, *self._writing])
        self._reading, self._writing = [], []
        self._extents.release()
        self.length = 0

    @property
    def _on_disk(self) -> int:
        """Tokens in complete groups, per row."""
        return self.length - self.length % self.layout.group_tokens

    def _new_groups(self, count: int) -> Bytes:
        groups = aligned(self.rows * count * self.layout.group_bytes)
        return groups.reshape(self.rows, count, self.layout.group_bytes)

    def _in_tail(self, first: int, count: int) -> Bytes:
        """Tokens of the tails from ``first`` on, ``(B, count, H_kv, E)``, sharing memory."""
        tokens = self.layout.tokens(self._tail)[:, 0, first : first + count]
        return tokens.reshape(self.rows, count, self.heads, self.entry_bytes)

    def _write_groups(self, tokens: Bytes, group: int) -> None:
        """Write tokens ``(B, n, H_kv, E)`` that fill the groups from the number ``group`` on."""
        per_group = self.layout.group_tokens
        stage_tokens = max(1, STAGE // (self.rows * self.layout.group_bytes)) * per_group
        for first in range(0, tokens.shape[1], stage_tokens):
            part = tokens[:, first : first + stage_tokens]
            stage = self._new_groups(part.shape[1] // per_group)
            shape = *stage.shape[:2], per_group, self.heads, self.entry_bytes
            self.layout.tokens(stage).reshape(shape)[...] = part.reshape(shape)
            self._write(stage, group + first // per_group)

    def _write(self, stage: Bytes, first: int) -> None:
        self._writing = [future for future in self._writing if not future.done()]
        self._writing += self._extents.write(stage, first)

    def _plan(self, wanted: Indices) -> tuple[list[tuple[Bytes, int]], Bytes, Indices]:
        """Reads for the slots ``(B, H_kv, n)``, their buffer, and each entry's place in it."""
        row, on_disk = np.arange(self.rows)[:, None, None], self._on_disk
        if wanted.size == 0 or int(wanted.max()) < on_disk:
            runs = self.layout.coalesce(self._extents.addresses(row, wanted), self.file.gap)
            size = int(runs.sizes.sum())
            buffer, places = aligned(size), runs.places
        else:
            stored = wanted < on_disk
            rows = np.broadcast_to(row, wanted.shape)[stored]
            addresses = self._extents.addresses(rows, wanted[stored])
            runs = self.layout.coalesce(addresses, self.file.gap)
            size = int(runs.sizes.sum())
            buffer = aligned(size + self._tail.nbytes)
            # The tails as they are now: other tokens may follow before the read is over.
            buffer[size:] = self._tail.reshape(-1)
            inside = (wanted - on_disk) * self.layout.token_bytes
            places = size + row * self.layout.group_bytes + inside
            places[stored] = runs.places
        pieces = [
            (buffer[place : place + nbytes], offset)
            for offset, nbytes, place in runs.pieces(LONGEST)
        ]
        self._count(len(pieces), size)
        return pieces, buffer, places + self._head_starts

    def _groups_of(self, entries: Bytes, first: int, groups: int) -> Bytes:
        """Groups within one row's entries ``(H_kv, T, E)``, sharing memory:
        ``(groups, group_tokens, H_kv, E)``.
        """
        per_group = self.layout.group_tokens
        part = entries[:, first * per_group : (first + groups) * per_group]
        split = part.reshape(self.heads, groups, per_group, self.entry_bytes)
        return split.transpose(1, 2, 0, 3)

    def _check_slots(self, slots: Indices, lowest: int) -> None:
        if slots.size and not lowest <= slots.min() <= slots.max() < self.length:
            raise IndexError(f"slots are {slots.min()} to {slots.max()} of {self.length} in use")

    def _count(self, reads: int, nbytes: int) -> None:
        self.reads += reads
        self.bytes_read += nbytes
        self.file.bytes_read += nbytes
        self._reading = [future for future in self._reading if not future.done()]

    def _settle_writes(self) -> None:
        self.file.check()
        self.file.writes.settle(self._writing)
        self._writing = []

    def _quiesce(self) -> None:
        """Wait for reads and writes; a read's failure is for whoever waits for it."""
        settle(self._reading)
        self._reading = []
        self._settle_writes()


def _bytes(entries: Tensor) -> Bytes:
    return entries.cpu().numpy()


def _slots(slots: Tensor) -> Indices:
    return slots.cpu().numpy()
