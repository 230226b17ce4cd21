"""The link moves packed entries between their home and the device.

This package is the only place for streams, events, pinned staging and threads: `base` has the link
itself, `pace` its emulated rate, `cuda` how a CUDA device reaches a store in host memory.
"""

from infinigen_kv.storage.link.base import Link, LinkStatistics, Transfer
from infinigen_kv.storage.link.pace import PAPER_RATIO, LinkSpec, Pace, paper_rate

__all__ = ["PAPER_RATIO", "Link", "LinkSpec", "LinkStatistics", "Pace", "Transfer", "paper_rate"]
