"""What makes a model the one that a calibration was made for."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from infinigen_kv.models.adapters.base import Adapter


def model_fingerprint(adapter: Adapter) -> dict[str, Any]:
    """Architecture, shapes and a hash of the query weights, as plain JSON values.

    The hash is of the weights rounded to bfloat16, so that one checkpoint has one fingerprint
    whether it was loaded as float32 or bfloat16.
    """
    return {
        "family": adapter.family,
        "hidden_size": adapter.hidden_size,
        "layers": [
            [spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.is_sliding]
            for spec in adapter.layers
        ],
        "query_weights_sha256": _query_weight_hash(adapter),
    }


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
                rounded = tensor.detach().to("cpu", torch.bfloat16).contiguous()
                running.update(rounded.view(torch.int16).numpy().data)
    return running.hexdigest()
