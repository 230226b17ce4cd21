"""KV as it is, in memory, on the device of the tensors that it is given."""

from __future__ import annotations

from torch import Tensor

from infinigen_kv.attention.entries import Entries
from infinigen_kv.storage.homes.buffer import TokenBuffer


class UnpackedHome:
    """The KV of one layer of one cache. A token's slot is its place in order of arrival.

    Keys and values have a buffer each: a matmul over all keys of a head then reads contiguous rows,
    which a CPU does four times faster than rows with a gap.
    """

    def __init__(self, keys: Tensor, values: Tensor, capacity: int = 0) -> None:
        """Reserve ``capacity`` tokens for keys and values like these, ``(B, H_kv, Q, D)``."""
        self._keys, self._values = (
            TokenBuffer(
                like.shape[0],
                like.shape[1],
                like.shape[3],
                dtype=like.dtype,
                device=like.device,
                capacity=capacity,
            )
            for like in (keys, values)
        )

    @property
    def rows(self) -> int:
        """Batch rows."""
        return self._keys.rows

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._keys.length

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self._keys.nbytes + self._values.nbytes

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens, ``(B, H_kv, Q, D)`` each."""
        self._keys.extend(keys.shape[2]).copy_(keys)
        self._values.extend(values.shape[2]).copy_(values)

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``(B, H_kv, n, D)`` of the slots ``(B, H_kv, n)``."""
        return self._keys.gather(slots), self._values.gather(slots)

    def all(self) -> tuple[Tensor, Tensor]:
        """All keys and values, ``(B, H_kv, T, D)`` each; not to be kept or written to."""
        return self._keys.view(), self._values.view()

    def in_place(self, slots: Tensor) -> Entries:
        """As `gather`, without a copy."""
        return Entries(self._keys.storage, self._values.storage, slots)

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        self._keys.truncate(length)
        self._values.truncate(length)

    def take_rows(self, index: Tensor) -> None:
        """Become the batch rows ``index`` ``(n,)``, repeats allowed."""
        self._keys.take_rows(index)
        self._values.take_rows(index)
