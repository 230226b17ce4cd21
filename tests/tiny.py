"""Tiny random models of every supported family, built from configuration objects.

Weights are drawn so that tests can see every part: attention is peaked instead of flat, biases are
not 0, norm weights not 1, and sizes differ wherever a family lets them, so that a mix-up changes
the shape or the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 128
MAX_POSITIONS = 512
PAD_TOKEN = 0

_COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_POSITIONS,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "pad_token_id": PAD_TOKEN,
        "bos_token_id": 1,
        # No end token: generation in tests runs to the length asked for.
        "eos_token_id": None,
    }
)
# H * D = 64 differs from the hidden size.
_GROUPED: Mapping[str, Any] = MappingProxyType(
    {"hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16}
)
_MIXED_LAYERS = ("sliding_attention", "full_attention", "sliding_attention", "full_attention")


def llama(**changes: Any) -> Any:
    """Grouped heads, no biases."""
    return _build(LlamaForCausalLM, LlamaConfig, {**_GROUPED, **changes})


def mistral(**changes: Any) -> Any:
    """Grouped heads, no window unless asked for."""
    return _build(
        MistralForCausalLM, MistralConfig, {**_GROUPED, "sliding_window": None, **changes}
    )


def qwen2(**changes: Any) -> Any:
    """Grouped heads; biases on query, key and value."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}
    return _build(Qwen2ForCausalLM, Qwen2Config, {**sizes, **changes})


def qwen3(**changes: Any) -> Any:
    """Grouped heads; norms on the heads of query and key."""
    return _build(Qwen3ForCausalLM, Qwen3Config, {**_GROUPED, **changes})


def gemma2(**changes: Any) -> Any:
    """Capped scores, sliding and full layers by turns, a scaling other than D ** -0.5."""
    settings = {
        **_GROUPED,
        "layer_types": list(_MIXED_LAYERS),
        "sliding_window": 20,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 20.0,
    }
    return _build(Gemma2ForCausalLM, Gemma2Config, {**settings, **changes})


def gemma3(**changes: Any) -> Any:
    """Head norms, a rotary base for each kind of layer, a scaling other than D ** -0.5."""
    settings = {
        **_GROUPED,
        "layer_types": list(_MIXED_LAYERS),
        "sliding_window": 16,
        "query_pre_attn_scalar": 12,
    }
    return _build(Gemma3ForCausalLM, Gemma3TextConfig, {**settings, **changes})


def phi3(**changes: Any) -> Any:
    """Fused projection, grouped heads, half of each head rotated."""
    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
        },
    }
    return _build(Phi3ForCausalLM, Phi3Config, {**settings, **changes})


def gpt_neox(**changes: Any) -> Any:
    """Fused projection with biases, a quarter of each head rotated."""
    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
        },
    }
    return _build(GPTNeoXForCausalLM, GPTNeoXConfig, {**settings, **changes})


def opt(**changes: Any) -> Any:
    """Learned positions, biases everywhere."""
    return _build(OPTForCausalLM, OPTConfig, {"hidden_size": 64, "ffn_dim": 96, **changes})


TINY: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "opt": opt,
        # The layout of OPT-350m: norms after attention, embeddings of another size.
        "opt_post_norm": partial(opt, do_layer_norm_before=False, word_embed_proj_dim=32),
        "llama": llama,
        "mistral": mistral,
        "mistral_sliding": partial(mistral, sliding_window=24),
        "qwen2": qwen2,
        "qwen3": qwen3,
        "gemma2": gemma2,
        "gemma3": gemma3,
        "phi3": phi3,
        "gpt_neox": gpt_neox,
    }
)


def _build(
    model_class: type[PreTrainedModel], config_class: Any, settings: Mapping[str, Any]
) -> Any:
    model: Any = model_class(config_class(**{**_COMMON, **settings}))
    model.to(torch.float32)
    randomise(model, seed=1234)
    return model.eval()


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """Redraw every parameter, in place, from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            # Gemma keeps its norm weights as differences from 1. The norms of query and key heads
            # alone set how peaked attention is where there are any.
            offset = 0.0 if model.config.model_type.startswith("gemma") else 1.0
            parameter.copy_(offset + (0.8 if "q_norm" in name else 0.0) + 0.3 * noise)
        elif "embed" in name:
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(0.25 * noise)
