"""Which layers of a model select, and which keep all their KV on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import InputError
from infinigen_kv.policies.entry import CachePlan
from infinigen_kv.storage.config import StorageConfig, hard_layers


class Layer(Protocol):
    """What tells a layer's part in a cache, e.g. `models.adapters.LayerSpec`."""

    @property
    def index(self) -> int:
        """Number of the layer."""

    @property
    def is_sliding(self) -> bool:
        """Whether it attends within a window only."""


def selecting_layers(layers: Iterable[Layer], plan: CachePlan) -> set[int]:
    """Layers that attend to a selection, but for those that are kept on the device whole.

    Policies that do not rehearse need no predecessor, so they select in the first layer too.
    """
    if plan.selecting is None:
        return set()
    if plan.rehearses:
        return speculated_layers(layers, plan.config)
    return {layer.index for layer in layers if not layer.is_sliding}


def speculated_layers(layers: Iterable[Layer], config: InfiniGenConfig) -> set[int]:
    """Layers that can be rehearsed."""
    return {
        layer.index
        for layer in layers
        if not layer.is_sliding and layer.index >= config.first_layer
    }


def resident_layers(
    layers: Iterable[Layer],
    storage: StorageConfig,
    speculated: set[int],
    device: torch.device,
    report: Mapping[str, Any],
) -> set[int]:
    """Layers with full attention that keep all their KV on the device.

    ``report`` is the calibration's, with how well each of the ``speculated`` layers is predicted.
    Raises `InputError` if the storage names a layer that has no full attention.
    """
    full = {layer.index for layer in layers if not layer.is_sliding}
    wanted = storage.resident_layers
    if wanted != "auto":
        unknown = set(wanted) - full
        if unknown:
            raise InputError(
                f"resident_layers={sorted(wanted)} is not valid: {min(unknown)} is not a layer "
                f"with full attention; those are {sorted(full)}"
            )
        return set(wanted)
    if storage.is_local_on(device):
        return set()
    return (full - speculated) | (hard_layers(report) & speculated)
