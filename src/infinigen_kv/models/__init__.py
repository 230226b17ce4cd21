"""Models: from a name to weights and tokenizer, and what the engine must know of a family."""
