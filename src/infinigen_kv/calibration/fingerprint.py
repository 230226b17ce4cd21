"""What makes a model the one that a calibration was made for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.models.adapters.base import Adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLED = 4096  # numbers of each weight that stand for all of it, about


def model_fingerprint(adapter: Adapter) -> dict[str, Any]:
    """Architecture, shapes, positions and hashes of the weights, as plain JSON values.

    Covers all that a calibration depends on: layer i's queries, and what leads to the inputs that
    they are predicted from, which every weight of the decoder does. Query weights are hashed whole,
    the others by a sample (`weights_hash`). The output head does not count.

    The hashes are of weights rounded to bfloat16, so that one checkpoint has one fingerprint
    whether it was loaded as float32 or bfloat16.
    """
    return {
        "family": adapter.family,
        "hidden_size": adapter.hidden_size,
        "layers": [
            [spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.is_sliding]
            for spec in adapter.layers
        ],
        "positions": _positions(adapter),
        "query_weights_sha256": _query_weight_hash(adapter),
        "weights_sha256": weights_hash(adapter.decoder.parameters()),
    }


def model_digest(model: PreTrainedModel) -> str:
    """Short name of what a model computes: all its weights count, its head's included."""
    return digest([model_fingerprint(adapter_for(model)), weights_hash(model.parameters())])


def weights_hash(weights: Iterable[Tensor]) -> str:
    """SHA-256 of about `SAMPLED` numbers of each weight, evenly spaced, as bfloat16.

    It takes milliseconds for any size of model. A change of a share p of a weight's numbers goes
    unseen with probability (1 - p) ** 4096: fine-tuning, merged adapters and pruning are seen,
    single numbers are not, nor what bfloat16 rounds away.
    """
    running = hashlib.sha256()
    for weight in weights:
        flat = weight.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLED) | 1  # odd, or it might stay in a few columns
        running.update(_rounded_bytes(flat[::step]))
    return running.hexdigest()


def digest(values: Any) -> str:
    """Short stable name of JSON values, for folders of cached artefacts."""
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def text_hash(texts: list[str]) -> str:
    """SHA-256 of texts, their boundaries included."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _query_weight_hash(adapter: Adapter) -> str:
    running = hashlib.sha256()
    for spec in adapter.layers:
        weight, bias = adapter.query_weight(spec.index)
        for tensor in (weight, bias):
            if tensor is not None:
                running.update(_rounded_bytes(tensor.detach()))
    return running.hexdigest()


def _rounded_bytes(weight: Tensor) -> memoryview:
    rounded = weight.to("cpu", torch.bfloat16).contiguous()
    return rounded.view(torch.int16).numpy().data


def _positions(adapter: Adapter) -> str | None:
    """Digest of the rotary settings: equal weights with others make other queries."""
    config = adapter.config
    own = [getattr(config, name, None) for name in ("rope_parameters", "rope_theta")]
    return digest(own) if adapter.is_rotary else None
