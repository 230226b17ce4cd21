"""A pool joins the home, the link and the resident set of one layer of one cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from infinigen_kv.attention.entries import Entries
from infinigen_kv.rehearsal.select import Selection


class Pool(ABC):
    """KV of one layer of one cache, as its attention sees it.

    A decode step that selects calls `prefetch`, `collect` and `append`; one that needs everything
    calls `prefetch_all` (optional, ahead of time) and `extend`.
    """

    @property
    @abstractmethod
    def rows(self) -> int:
        """Batch rows."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens seen: where the next one's position starts. Evicted tokens count."""

    @property
    @abstractmethod
    def home_bytes(self) -> int:
        """Bytes reserved in the home."""

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """Bytes of KV kept on the device."""

    @property
    def free(self) -> int | None:
        """Tokens that can be added before others are evicted for them; None for any number."""
        return None

    @property
    def sinks(self) -> int:
        """First real tokens of each row that are never evicted."""
        return 0

    def set_padding(self, padding: Sequence[int]) -> None:
        """Say where the first real token of each row is, before it is added; 0 if nobody does."""

    @property
    def positions(self) -> Tensor | None:
        """``(B, slots)`` position of the token in each slot; None while slot t holds token t."""
        return None

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor) -> Tensor | None:
        """Add tokens, ``(B, H_kv, Q, D)`` each.

        Returns their slots ``(B, Q)``, -1 for tokens dropped at once; None where slots are
        positions.
        """

    @abstractmethod
    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add tokens, and return all keys and values with the new ones last, and their slots.

        Not to be kept or written to. With evictions the others are those that were held before.
        """

    @abstractmethod
    def prefetch(self, selection: Selection, rows: Sequence[bool] | None = None) -> None:
        """Start to move a step's entries; ``selection.index`` ``(B, H_kv, 1, n)`` are slots.

        Of others than ``rows``, where they are given, everything is moved, as alone: that is no
        use of an entry.
        """

    @abstractmethod
    def collect(self) -> tuple[Tensor, Tensor]:
        """Keys and values ``(B, H_kv, n, D)`` of what `prefetch` started to move."""

    def collect_in_place(self) -> Entries:
        """As `collect`, without a copy of what lies on the device already."""
        return Entries(*self.collect(), None)

    def prefetch_all(self) -> None:
        """Start to move everything."""

    @abstractmethod
    def all(self) -> tuple[Tensor, Tensor]:
        """All keys and values held, in the order of slots; not to be kept or written to."""

    def discard(self) -> None:
        """Forget what was started and will not be collected."""

    def forget_resident(self) -> None:
        """Forget what the device keeps beside the home: a step may have left it half-written."""

    def fill_resident(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """A hint that these slots ``(B, H_kv, n)``, best first, will be wanted soon; -1 for none.

        ``keys`` and ``values`` ``(B, H_kv, n, D)`` are theirs, on the device.
        """

    @property
    def resident_budget(self) -> int:
        """Entries per head that `warm` has a use for."""
        return 0

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forget the tokens from position ``length`` on."""

    @abstractmethod
    def take_rows(self, index: Tensor) -> None:
        """Become the batch rows ``index`` ``(n,)``, repeats allowed."""

    def close(self) -> None:
        """Release what is held outside of memory; may be called twice."""
