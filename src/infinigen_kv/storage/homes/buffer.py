"""A preallocated buffer of one vector per token, row and head."""

from __future__ import annotations

import torch
from torch import Tensor

from infinigen_kv.storage.homes.pinned import HostMemory

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
    memory
        Where a buffer on the host gets its memory; None for the ordinary, pageable one.
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
        memory: HostMemory | None = None,
    ) -> None:
        self.length = 0
        self._memory = memory
        shape = (rows, heads, max(capacity, SMALLEST), width)
        self._storage = self._new(shape, dtype, device)
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

    @property
    def is_pinned(self) -> bool:
        """Whether a CUDA device can read the storage itself."""
        return self._memory is not None and self._storage.is_pinned()

    def lines(self) -> Tensor:
        """The storage as ``(B * H * capacity, W)``, unused places included, sharing memory."""
        return self._storage.view(-1, self._storage.shape[3])

    @property
    def storage(self) -> Tensor:
        """``(B, H, capacity, W)``, unused places included, sharing memory."""
        return self._storage

    def view(self) -> Tensor:
        """The tokens written so far, ``(B, H, T, W)``, sharing memory."""
        return self._storage[:, :, : self.length]

    def extend(self, tokens: int) -> Tensor:
        """Add ``tokens`` unwritten places and return them, ``(B, H, tokens, W)``, to be filled."""
        start, end = self.length, self.length + tokens
        if end > self._storage.shape[2]:  # asked here too: this runs for every token
            self.reserve(end)
        self.length = end
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
        rows, heads, _, width = self._storage.shape
        vectors = self.lines().index_select(0, self._flat(index))
        return vectors.view(rows, heads, index.shape[-1], width)

    def gather_into(self, index: Tensor, out: Tensor) -> None:
        """As `gather`, into ``out`` ``(B, H, n, W)``, contiguous."""
        flat_out = out.view(-1, out.shape[3])
        torch.index_select(self.lines(), 0, self._flat(index), out=flat_out)

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on; more than there are forgets none."""
        self.length = max(0, min(self.length, length))

    def take_rows(self, index: Tensor) -> None:
        """Become the batch rows ``index`` ``(n,)`` of this buffer, repeats allowed."""
        self._replace(self.view()[index.to(self._storage.device)], self.capacity)

    def _flat(self, index: Tensor) -> Tensor:
        """Lines of the tokens ``index`` ``(B, H, n)``: ``(B * H * n,)``."""
        rows, heads, capacity, _ = self._storage.shape
        if self._row_offsets is None:
            steps = torch.arange(rows * heads, device=self._storage.device) * capacity
            self._row_offsets = steps.view(rows, heads, 1)
        return (index.to(self._storage.device) + self._row_offsets).reshape(-1)

    def _replace(self, content: Tensor, capacity: int) -> None:
        rows, heads, length, width = content.shape
        storage = self._new((rows, heads, capacity, width), content.dtype, content.device)
        storage[:, :, :length] = content
        self._storage = storage
        self._row_offsets = None

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._memory is None:
            return _writable(shape, dtype, device)
        return self._memory.empty(shape, dtype)


def _writable(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory.

    What `torch.inference_mode` allocates may not be written to outside of it, where a later turn
    may well take place.
    """
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)
