"""The arithmetic of a decode step: PyTorch as the reference, compiled code for a CPU."""
