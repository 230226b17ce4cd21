"""The space of one layer in the file of a disk home: groups of tokens in and out."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from infinigen_kv.storage.homes.disk.file import DiskFile
from infinigen_kv.storage.homes.disk.jobs import Batch
from infinigen_kv.storage.homes.disk.layout import Bytes, Indices, Layout, Span
from infinigen_kv.storage.homes.disk.scratch import aligned


class Change(NamedTuple):
    """Tokens to replace in the group at ``offset`` of the file."""

    offset: int
    places: list[int]
    """In the group."""
    items: list[int]
    """Of the new tokens."""


class Extents:
    """Each batch row's extents, ``starts`` ``(B, X)``.

    Parameters
    ----------
    file, layout
        Of the layer.
    rows
        B.
    """

    def __init__(self, file: DiskFile, layout: Layout, rows: int) -> None:
        self._file = file
        self._layout = layout
        self.starts: Indices = np.empty((rows, 0), dtype=np.int64)

    @property
    def rows(self) -> int:
        """Batch rows B."""
        return self.starts.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self.starts.size * self._layout.extent_bytes

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` in total per row; raises `HomeError` if the disk is full."""
        missing = self._layout.extents(tokens) - self.starts.shape[1]
        if missing > 0:
            new = self._file.allocate(self._layout.extent_bytes, self.rows * missing)
            self.starts = np.hstack([self.starts, new.reshape(self.rows, missing)])

    def release(self) -> None:
        """Give everything back to the file."""
        self._file.free(self._layout.extent_bytes, self.starts)
        self.starts = self.starts[:, :0]

    def addresses(self, rows: Indices, tokens: Indices) -> Indices:
        """Where tokens start in the file; ``rows``, their batch rows, broadcast to ``tokens``."""
        return self._layout.addresses(self.starts, rows, tokens)

    def spans(self, first: int, groups: int) -> Iterator[tuple[int, Span]]:
        """Where the groups from ``first`` on lie: pieces ``(row, span)`` of at most an extent."""
        for row in range(self.rows):
            for span in self._layout.spans(self.starts[row], first, groups):
                yield row, span

    def write(self, stage: Bytes, first: int) -> list[Future[None]]:
        """Write the groups ``(B, n, group_bytes)``, which nobody changes any more, from the number
        ``first`` on, behind the computation.
        """
        spans = list(self.spans(first, stage.shape[1]))

        def work() -> None:
            for row, span in spans:
                at = span.first - first
                self._file.write(stage[row, at : at + span.groups].reshape(-1), span.offset)

        return self._file.writes.submit(stage.nbytes, work)

    def overwrite(self, changes: list[Change], tokens: Bytes) -> list[Future[None]]:
        """Replace single tokens by some of ``tokens`` ``(n, token_bytes)``, behind the computation:
        their groups are read, changed and written back.
        """

        def work() -> None:
            group = aligned(self._layout.group_bytes)
            for change in changes:
                self._file.read(group, change.offset)
                self._layout.tokens(group)[change.places] = tokens[change.items]
                self._file.write(group, change.offset)

        return self._file.writes.submit(len(changes) * self._layout.group_bytes, work)

    def load(self, into: Bytes, group: int) -> None:
        """Read one group of each row: ``(B, group_bytes)``."""
        for row, span in self.spans(group, 1):
            self._file.read(into[row], span.offset)

    def take_rows(self, index: list[int], groups: int) -> None:
        """Become the rows ``index``: each repeat is a copy of the first ``groups`` groups, put in
        the extents of a row that is not wanted any more, or in new ones.
        """
        repeats = [place for place, row in enumerate(index) if row in index[:place]]
        unwanted = sorted(set(range(self.rows)) - set(index))
        spare = self.starts[unwanted]
        fresh, width = max(0, len(repeats) - len(spare)), self.starts.shape[1]
        if fresh:
            new = self._file.allocate(self._layout.extent_bytes, fresh * width)
            spare = np.vstack([spare, new.reshape(fresh, width)])
        taken = self.starts[index]
        sources = taken[repeats]
        taken[repeats] = spare[: len(repeats)]
        self._copy(sources, taken[repeats], groups).wait()
        self._file.free(self._layout.extent_bytes, spare[len(repeats) :])
        self.starts = taken

    def _copy(self, sources: Indices, targets: Indices, groups: int) -> Batch:
        def work(source: Span, target: Span) -> None:
            content = aligned(source.groups * self._layout.group_bytes)
            self._file.read(content, source.offset)
            self._file.write(content, target.offset)

        pieces = [
            pair
            for source, target in zip(sources, targets, strict=True)
            for pair in zip(
                self._layout.spans(source, 0, groups),
                self._layout.spans(target, 0, groups),
                strict=True,
            )
        ]
        return self._file.start(work, pieces, len(sources) * groups * self._layout.group_bytes)
