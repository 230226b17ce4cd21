"""Llama, and Mistral, which adds a sliding window to every layer or to none."""

from __future__ import annotations

from infinigen_kv.models.adapters.base import Adapter


class LlamaAdapter(Adapter):
    """The generic layout as it is."""

    family = "llama"
    model_types = ("llama",)


class MistralAdapter(Adapter):
    """Llama's layout; ``config.sliding_window`` holds for every layer."""

    family = "mistral"
    model_types = ("mistral",)

    def _is_sliding(self, index: int) -> bool:
        return self.config.sliding_window is not None
