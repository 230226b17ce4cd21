"""A preallocated buffer of one vector per token, row and head."""

from __future__ import annotations

import torch
from torch import Tensor

GROWTH = 1.5
SMALLEST = 256  # tokens


class TokenBuffer:
    """``(B, H, T, W)`` vectors in memory for ``(B, H, capacity, W)``, written in place.

    Grows by half when full, so that a step costs no copy of the whole on average.

    Parameters
    ----------
    rows, heads, width
        B, H and W.
    dtype, device
        Of the storage.
    capacity
        Tokens to reserve at once.
    """

    def __init__(
        self,
        rows: int,
        heads: int,
        width: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int = 0,
    ) -> None:
        self.length = 0
        shape = (rows, heads, max(capacity, SMALLEST), width)
        self._storage = _writable(shape, dtype, device)
        self._row_offsets: Tensor | None = None

    @property
    def rows(self) -> int:
        """Batch rows B."""
        return self._storage.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that fit before the buffer grows."""
        return self._storage.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self._storage.nbytes

    def view(self) -> Tensor:
        """The tokens written so far, ``(B, H, T, W)``, sharing memory."""
        return self._storage[:, :, : self.length]

    def extend(self, tokens: int) -> Tensor:
        """Add ``tokens`` unwritten places and return them, ``(B, H, tokens, W)``, to be filled."""
        start = self.length
        self.reserve(start + tokens)
        self.length = start + tokens
        return self._storage[:, :, start : self.length]

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` in total."""
        if tokens > self.capacity:
            self._replace(self.view(), max(tokens, int(self.capacity * GROWTH)))

    def write(self, slots: Tensor, vectors: Tensor) -> None:
        """Put ``vectors`` ``(B, H, n, W)`` at ``slots`` ``(B, n)``; new slots follow those in use.

        A slot of -1 is skipped.
        """
        self.reserve(int(slots.max()) + 1)
        self.length = max(self.length, int(slots.max()) + 1)
        for row in range(slots.shape[0]):
            used = slots[row] >= 0
            places = slots[row][used].to(self._storage.device)
            self._storage[row].index_copy_(1, places, vectors[row][:, used])

    def gather(self, index: Tensor) -> Tensor:
        """Vectors of the tokens ``index`` ``(B, H, n)``: ``(B, H, n, W)``.

        One `index_select` over a flat view: on a CPU several times faster than `torch.gather`
        with an expanded index.
        """
        rows, heads, capacity, width = self._storage.shape
        if self._row_offsets is None:
            steps = torch.arange(rows * heads, device=self._storage.device) * capacity
            self._row_offsets = steps.view(rows, heads, 1)
        flat = (index + self._row_offsets).reshape(-1)
        vectors = self._storage.view(-1, width).index_select(0, flat)
        return vectors.view(rows, heads, index.shape[-1], width)

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on; more than there are forgets none."""
        self.length = max(0, min(self.length, length))

    def take_rows(self, index: Tensor) -> None:
        """Become the batch rows ``index`` ``(n,)`` of this buffer, repeats allowed."""
        self._replace(self.view()[index.to(self._storage.device)], self.capacity)

    def _replace(self, content: Tensor, capacity: int) -> None:
        rows, heads, length, width = content.shape
        storage = _writable((rows, heads, capacity, width), content.dtype, content.device)
        storage[:, :, :length] = content
        self._storage = storage
        self._row_offsets = None


def _writable(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory.

    What `torch.inference_mode` allocates may not be written to outside of it, where a later turn
    may well take place.
    """
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)
