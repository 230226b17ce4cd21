"""The cache that Transformers sees: layers, steps of a forward, faults."""
