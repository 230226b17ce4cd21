"""Pools: the KV of one layer as its attention sees it."""
