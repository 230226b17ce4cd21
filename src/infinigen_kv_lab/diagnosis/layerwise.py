"""What selection in some layers only does to the next-token distribution."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.cache.forward import decode, prefill
from infinigen_kv.policies.full import FullPolicy
from infinigen_kv.session.attach import Session
from infinigen_kv_lab.bench.fidelity import forgetting
from infinigen_kv_lab.kit.divergence import kl_divergence, log_probabilities


class LayerwiseKL:
    """One text, decoded again and again from the same prompt, with selection in some layers only.

    Parameters
    ----------
    session
        An attached model with a calibration.
    prompt
        ``(P,)`` token ids, read once, in full.
    decoded
        ``(T,)`` token ids that follow; they go through the model in one forward, so few.
    """

    @torch.no_grad()
    def __init__(self, session: Session, prompt: Tensor, decoded: Tensor) -> None:
        self._session = session
        self._cache = session.new_cache(tokens=len(prompt) + len(decoded))
        device = session.model.device
        self._decoded = decoded.to(device)[None]
        prefill(session, self._cache, prompt.to(device)[None])
        self._full = self._scores(())

    @torch.no_grad()
    def kl(self, layers: Collection[int]) -> float:
        """KL(full || selected) in nats per token where only ``layers`` select."""
        selected = self._scores(layers)
        return kl_divergence(self._full, selected).mean().item()

    def _scores(self, layers: Collection[int]) -> Tensor:
        """Log-probabilities ``(T, V)``, float32."""
        cache = self._cache
        with forgetting(cache), selecting_only(cache, layers):
            logits = decode(self._session.model, self._decoded, cache)
        return log_probabilities(logits[0])


@contextmanager
def selecting_only(cache: InfiniGenCache, layers: Collection[int]) -> Iterator[None]:
    """Inside the block, other layers than these attend to everything.

    They do not see the tokens that come meanwhile: take those back afterwards (`forgetting`).
    """
    before = {layer.spec.index: layer.policy for layer in cache.offloaded}
    try:
        for layer in cache.offloaded:
            if layer.spec.index not in layers:
                layer.policy = FullPolicy()
        yield
    finally:
        for layer in cache.offloaded:
            layer.policy = before[layer.spec.index]
