"""A model while it is attached, and the facade over it."""
