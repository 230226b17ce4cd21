"""The paper's skew as an offline transform of the weights, for models without rotary positions."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infinigen_kv.calibration.artefact import Calibration, LayerCalibration
from infinigen_kv.calibration.fingerprint import model_fingerprint, precision_of
from infinigen_kv.errors import InputError
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.models.adapters.base import Adapter
from infinigen_kv.models.adapters.layer_spec import LayerSpec


@torch.no_grad()
def fold_skew(
    model: PreTrainedModel, calibration: Calibration
) -> tuple[PreTrainedModel, Calibration]:
    """A copy of ``model`` with W_Q <- W_Q A and W_K <- W_K A (paper, section 4.2, equation 3).

    A is orthogonal, so the attention scores, and with them the model's output, stay the same up to
    rounding, while few columns of the new queries and keys carry most of their magnitude. Biases
    are multiplied too.

    Parameters
    ----------
    model
        Without rotary positions (OPT): a rotation between the projection and the product would not
        commute with A. Such models are skewed while they run instead.
    calibration
        Of ``model``.

    Returns
    -------
    tuple
        The new model and its calibration, whose A are identities.

    Raises
    ------
    InputError
        If the model has rotary positions.
    CalibrationError
        If the calibration belongs to another model.
    """
    adapter = adapter_for(model)
    if adapter.is_rotary:
        raise InputError(
            f"the skew cannot be folded into {adapter.family} models, which have rotary positions: "
            "use them as they are, the rehearsal applies it at run time"
        )
    calibration.check_model(adapter)
    folded = copy.deepcopy(model)
    target = adapter_for(folded)
    layers = {
        spec.index: _fold_layer(target, spec, calibration.layers[spec.index])
        for spec in target.layers
        if spec.index in calibration.layers
    }
    made = replace(
        calibration,
        fingerprint=model_fingerprint(target),
        precision=precision_of(target),
        layers=layers,
    )
    return folded, made


def _fold_layer(adapter: Adapter, spec: LayerSpec, layer: LayerCalibration) -> LayerCalibration:
    for projection in (adapter.query_weight(spec.index), adapter.key_weight(spec.index)):
        for tensor in projection:
            if tensor is not None:
                tensor.copy_(_skewed_rows(tensor, layer.skew))
    identity = torch.eye(spec.head_dim).expand_as(layer.skew).contiguous()
    return LayerCalibration(layer.down, _skewed_rows(layer.up.mT, layer.skew).mT, identity)


def _skewed_rows(weight: Tensor, skew: Tensor) -> Tensor:
    """Rows of heads, ``(H * D, ...)``, with every head's D rows multiplied by A^T."""
    heads, dim, _ = skew.shape
    rows = weight.double().reshape(heads, -1, dim, *weight.shape[1:])  # (H_kv, G, D, ...)
    turned = torch.einsum("hdc,hgd...->hgc...", skew.to(rows), rows)
    return turned.reshape(weight.shape).to(weight.dtype)
