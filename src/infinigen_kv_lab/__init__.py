"""The laboratory: what measures models, compares systems and reproduces the paper."""
