"""The pool of a layer whose KV is on the device: nothing moves."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from infinigen_kv.attention.entries import Entries
from infinigen_kv.rehearsal.select import Selection
from infinigen_kv.storage.homes.unpacked import UnpackedHome
from infinigen_kv.storage.pools.pool import Pool


class LocalPool(Pool):
    """Home and device are the same memory: nothing moves, entries are gathered where they are."""

    def __init__(self, keys: Tensor, values: Tensor, tokens: int = 0) -> None:
        """Reserve ``tokens`` tokens for keys and values like these, ``(B, H_kv, *, D)``."""
        self._home = UnpackedHome(keys, values, tokens)
        self._wanted: Tensor | None = None

    @property
    def rows(self) -> int:
        return self._home.rows

    @property
    def length(self) -> int:
        return self._home.length

    @property
    def home_bytes(self) -> int:
        return 0

    @property
    def device_bytes(self) -> int:
        return self._home.nbytes

    def append(self, keys: Tensor, values: Tensor) -> Tensor | None:
        self._home.append(keys, values)
        return None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        self._home.append(keys, values)
        return *self._home.all(), None

    def prefetch(self, selection: Selection, rows: Sequence[bool] | None = None) -> None:
        self._wanted = selection.index.squeeze(2)

    def collect(self) -> tuple[Tensor, Tensor]:
        assert self._wanted is not None
        return self._home.gather(self._wanted)

    def collect_in_place(self) -> Entries:
        assert self._wanted is not None
        return self._home.in_place(self._wanted)

    def all(self) -> tuple[Tensor, Tensor]:
        return self._home.all()

    def truncate(self, length: int) -> None:
        self._home.truncate(length)

    def take_rows(self, index: Tensor) -> None:
        self._home.take_rows(index)
