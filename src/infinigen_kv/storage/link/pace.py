"""How fast a link is: what the user asked for, and an emulated pace."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from infinigen_kv.errors import InputError

SPIN = 2e-4  # seconds before the end of a wait from which on sleeping is too coarse
SLOWEST = 1e-6  # GB/s
LONGEST = 60e6  # microseconds
PAPER_RATIO = 18.5  # streaming a layer's KV over one block's computation, paper, Figure 18


class Pace:
    """A link of a given rate, emulated: one transfer at a time, in either direction.

    A transfer completes no earlier than latency + bytes / rate after its start, which is when the
    transfers before it are over.

    Parameters
    ----------
    rate
        Bytes per second.
    latency
        Seconds per transfer.
    clock
        Seconds, monotonic.
    """

    def __init__(
        self, rate: float, latency: float = 0.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.rate = rate
        self.latency = latency
        self._clock = clock
        self._free_at = -math.inf
        self._lock = threading.Lock()

    def book(self, nbytes: int) -> float:
        """Queue a transfer that starts now; the time at which it is over."""
        with self._lock:
            start = max(self._clock(), self._free_at)
            self._free_at = start + self.latency + nbytes / self.rate
            return self._free_at

    def wait_until(self, moment: float) -> None:
        """Let time pass, to some microseconds."""
        while (left := moment - self._clock()) > 0:
            if left > SPIN:
                time.sleep(left - SPIN)


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """What the user asked for: ``none``, ``emulated:<GB/s>[,<latency us>]`` or ``emulated:paper``.

    ``rate`` is in bytes per second; None for ``none``, and for ``emulated:paper`` until a measured
    block time gives it (`paper_rate`).
    """

    text: str
    rate: float | None = None
    latency: float = 0.0

    @property
    def is_emulated(self) -> bool:
        """Whether figures over this link must be called emulated."""
        return self.text != "none"

    @property
    def is_paper(self) -> bool:
        """Whether the rate follows from the model's own speed."""
        return self.text == "emulated:paper"

    @classmethod
    def parse(cls, text: str) -> LinkSpec:
        """Read the command line's form; `InputError` says what is allowed."""
        if text in ("none", "emulated:paper"):
            return cls(text)
        match = re.fullmatch(r"emulated:([0-9.eE+-]+)(?:,([0-9.eE+-]+))?", str(text))
        try:
            rate, latency = (float(part or 0) for part in match.groups()) if match else (0.0, 0.0)
        except ValueError:
            rate = latency = 0.0
        if not (SLOWEST <= rate < math.inf and 0 <= latency <= LONGEST):
            raise InputError(
                f"link={text!r} is not valid: it must be 'none', 'emulated:paper' or "
                "'emulated:<GB/s>[,<latency in microseconds>]', e.g. 'emulated:16,10', with at "
                f"least {SLOWEST:g} GB/s and at most {LONGEST:g} microseconds"
            )
        return cls(text, rate * 1e9, latency * 1e-6)


def paper_rate(layer_bytes: int, block_seconds: float) -> float:
    """Bytes per second that stream one layer's KV in 18.5 times one block's computation."""
    return layer_bytes / (PAPER_RATIO * block_seconds)
