"""The decode step in compiled code, for models on a CPU; needs numba."""
