"""The link moves entries from their home to the device.

This module is the only place for streams, events, pinned staging and threads. In one memory there
is nothing to move: `DirectLink` gathers when the attention asks.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from infinigen_kv.pool import Home


class Transfer(Protocol):
    """Entries on their way."""

    def wait(self) -> tuple[Tensor, Tensor]:
        """Keys and values ``(B, H_kv, n, D)`` on the device, once they have arrived."""


class Link(Protocol):
    """Starts transfers; called as soon as a rehearsal has chosen, ahead of the attention."""

    def fetch(self, home: Home, slots: Tensor) -> Transfer:
        """Start to move the slots ``(B, H_kv, n)``."""


class DirectTransfer(NamedTuple):
    """Home and device are the same memory, so the gather itself is the only work."""

    home: Home
    slots: Tensor

    def wait(self) -> tuple[Tensor, Tensor]:
        return self.home.gather(self.slots)


class DirectLink:
    """The link ``none``."""

    def fetch(self, home: Home, slots: Tensor) -> Transfer:
        return DirectTransfer(home, slots)
