"""Where KV entries live: preallocated buffers, and homes made of them."""

from infinigen_kv.pool.buffer import TokenBuffer
from infinigen_kv.pool.home import Home, RamHome

__all__ = ["Home", "RamHome", "TokenBuffer"]
