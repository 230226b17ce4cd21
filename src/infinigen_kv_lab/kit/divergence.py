"""How far a selected cache's next-token distribution is from the full one's."""

from __future__ import annotations

from torch import Tensor


def log_probabilities(logits: Tensor) -> Tensor:
    """Of the next token, in nats, float32; shape as ``logits`` ``(..., V)``."""
    return logits.float().log_softmax(-1)


def kl_divergence(full: Tensor, selected: Tensor) -> Tensor:
    """KL(full || selected) in nats, of log-probabilities ``(..., V)``: ``(...,)``."""
    return (full.exp() * (full - selected)).sum(-1)
