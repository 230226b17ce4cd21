"""Where KV entries live: preallocated buffers, and homes made of them."""

from infinigen_kv.storage.homes.buffer import TokenBuffer
from infinigen_kv.storage.pools.home import Home, RamHome

__all__ = ["Home", "RamHome", "TokenBuffer"]
