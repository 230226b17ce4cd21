"""What makes a model the one that a calibration was made for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infinigen_kv.errors import CalibrationError
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.models.adapters.base import Adapter

HASH = "_sha256"  # ends the names of hashes of weights
SAMPLED = 4096  # numbers of each weight that stand for all of it, about


def model_fingerprint(adapter: Adapter, *, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Architecture, shapes, positions and hashes of the weights, as plain JSON values.

    Covers all that a calibration depends on: layer i's queries, and what leads to the inputs that
    they are predicted from, which every weight of the decoder does. Query weights are hashed whole,
    the others by a sample (`weights_hash`). The output head does not count.

    The hashes are of weights rounded to bfloat16, so that one checkpoint has one fingerprint
    whether it was loaded as float32 or bfloat16. With ``dtype``, that of the model in this type:
    float16 rounds what bfloat16 would have rounded otherwise.
    """
    return {
        "family": adapter.family,
        "hidden_size": adapter.hidden_size,
        "layers": [
            [spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.is_sliding]
            for spec in adapter.layers
        ],
        "positions": _positions(adapter),
        "query_weights_sha256": _query_weight_hash(adapter, dtype),
        "weights_sha256": weights_hash(adapter.decoder.parameters(), dtype=dtype),
    }


def model_digest(model: PreTrainedModel) -> str:
    """Short name of what a model computes: all its weights count, its head's included."""
    return digest([model_fingerprint(adapter_for(model)), weights_hash(model.parameters())])


def weights_hash(weights: Iterable[Tensor], *, dtype: torch.dtype | None = None) -> str:
    """SHA-256 of about `SAMPLED` numbers of each weight, evenly spaced, as bfloat16.

    It takes milliseconds for any size of model. A change of a share p of a weight's numbers goes
    unseen with probability (1 - p) ** 4096: fine-tuning, merged adapters and pruning are seen,
    single numbers are not, nor what bfloat16 rounds away. ``dtype`` as in `model_fingerprint`.
    """
    running = hashlib.sha256()
    for weight in weights:
        flat = weight.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLED) | 1  # odd, or it might stay in a few columns
        running.update(_rounded_bytes(flat[::step], dtype))
    return running.hexdigest()


def precision_of(adapter: Adapter) -> dict[str, Any]:
    """The weights' type, and the fingerprint's hashes of the same weights in float16."""
    return {"dtype": _dtype_name(adapter), "in_float16": _hashes(_halved(adapter))}


def check_fingerprint(
    adapter: Adapter, fingerprint: Mapping[str, Any], precision: Mapping[str, Any]
) -> None:
    """Raise `CalibrationError` unless they are those of the model, in this or another type."""
    theirs = model_fingerprint(adapter)
    others = [name for name, value in theirs.items() if fingerprint.get(name) != value]
    only_weights = all(name.endswith(HASH) for name in others)
    if only_weights and (not others or _is_same_in_float16(adapter, fingerprint, precision)):
        return
    reason = (
        f"the calibration belongs to another model: its {others[0]} is "
        f"{_short(fingerprint.get(others[0]))}, this model's is {_short(theirs[others[0]])}"
    )
    given = _dtype_name(adapter)
    recorded = precision.get("dtype", given if given != "float16" else "another type")
    if only_weights and given != recorded:
        raise CalibrationError(
            f"{reason}, or to this one in another type: it was made in {recorded}, and the model "
            f"is in {given}, which rounds the weights differently; load the model in the type of "
            f"the calibration, or calibrate it in {given}"
        )
    raise CalibrationError(f"{reason}; calibrate this model")


def digest(values: Any) -> str:
    """Short stable name of JSON values, for folders of cached artefacts."""
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def text_hash(texts: list[str]) -> str:
    """SHA-256 of texts, their boundaries included."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _is_same_in_float16(
    adapter: Adapter, fingerprint: Mapping[str, Any], precision: Mapping[str, Any]
) -> bool:
    """Whether one of them, the model or that of the fingerprint, is the other in float16."""
    recorded = precision.get("in_float16")
    if _dtype_name(adapter) == "float16" and isinstance(recorded, dict):
        fingerprint = {**fingerprint, **recorded}
    return all(fingerprint.get(name) == value for name, value in _halved(adapter).items())


def _halved(adapter: Adapter) -> dict[str, Any]:
    return model_fingerprint(adapter, dtype=torch.float16)


def _hashes(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fingerprint.items() if name.endswith(HASH)}


def _query_weight_hash(adapter: Adapter, dtype: torch.dtype | None) -> str:
    running = hashlib.sha256()
    for spec in adapter.layers:
        weight, bias = adapter.query_weight(spec.index)
        for tensor in (weight, bias):
            if tensor is not None:
                running.update(_rounded_bytes(tensor.detach(), dtype))
    return running.hexdigest()


def _rounded_bytes(weight: Tensor, dtype: torch.dtype | None) -> memoryview:
    rounded = weight.to("cpu", dtype).to(torch.bfloat16).contiguous()
    return rounded.view(torch.int16).numpy().data


def _positions(adapter: Adapter) -> str | None:
    """Digest of the rotary settings: equal weights with others make other queries."""
    config = adapter.config
    own = [getattr(config, name, None) for name in ("rope_parameters", "rope_theta")]
    return digest(own) if adapter.is_rotary else None


def _dtype_name(adapter: Adapter) -> str:
    """Of the model's weights, ``float32`` and the like."""
    return str(adapter.model.dtype).removeprefix("torch.")


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
