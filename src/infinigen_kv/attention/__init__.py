"""Attention as pure tensor functions, for every family."""
