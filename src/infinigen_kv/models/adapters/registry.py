"""From a model to the adapter of its family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infinigen_kv.errors import UnsupportedModelError
from infinigen_kv.models.adapters.base import Adapter
from infinigen_kv.models.adapters.gemma import Gemma2Adapter, Gemma3Adapter
from infinigen_kv.models.adapters.gpt_neox import GPTNeoXAdapter
from infinigen_kv.models.adapters.llama import LlamaAdapter, MistralAdapter
from infinigen_kv.models.adapters.opt import OPTAdapter
from infinigen_kv.models.adapters.phi3 import Phi3Adapter
from infinigen_kv.models.adapters.qwen import Qwen2Adapter, Qwen3Adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTERS: tuple[type[Adapter], ...] = (
    OPTAdapter,
    LlamaAdapter,
    MistralAdapter,
    Qwen2Adapter,
    Qwen3Adapter,
    Gemma2Adapter,
    Gemma3Adapter,
    Phi3Adapter,
    GPTNeoXAdapter,
)


def supported_families() -> tuple[str, ...]:
    """Names of the model families that have an adapter."""
    return tuple(adapter.family for adapter in _ADAPTERS)


def adapter_for(model: PreTrainedModel, *, shapes_only: bool = False) -> Adapter:
    """Build the adapter for a model.

    Parameters
    ----------
    model
        A causal language model of one of the supported families.
    shapes_only
        Accept a model on the ``meta`` device; its adapter tells sizes, not queries.

    Returns
    -------
    Adapter

    Raises
    ------
    UnsupportedModelError
        No adapter knows ``model.config.model_type``, or the adapter that does rejects the model.
    """
    model_type = model.config.model_type
    for adapter in _ADAPTERS:
        if model_type in adapter.model_types:
            return adapter(model, shapes_only=shapes_only)
    known = ", ".join(kind for adapter in _ADAPTERS for kind in adapter.model_types)
    raise UnsupportedModelError(
        f"Model type {model_type!r} ({type(model).__name__}) is not supported. Supported families: "
        f"{', '.join(supported_families())}. Load a model whose config.model_type is one of: "
        f"{known}."
    )
