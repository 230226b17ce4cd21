"""Homes: where the full KV of a layer lives, packed by a codec."""
