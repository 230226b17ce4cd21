"""What compiled code reads of a layer at every step and changes only where it is fitted anew."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from infinigen_kv.kernels.native.arrays import Array, as_array
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.statistics import Projection
from infinigen_kv.rehearsal.tail import ValueMap


class LayerArrays(NamedTuple):
    """The partial keys of a layer and the projection that made them.

    ``keys`` ``(B, H_kv, R, capacity)`` shares memory with ``storage``; ``query`` and ``key`` are
    ``(B, H_kv, D, R)`` and ``offset`` ``(B, H_kv, D)``, float32.
    """

    storage: Tensor
    projection: Projection
    keys: Array
    query: Array
    key: Array
    offset: Array

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Nothing: the arrays of copied partial keys are made of their own memory."""


def arrays_of(partial: PartialKeys) -> LayerArrays:
    """Of these partial keys; made again where they moved or have another projection."""
    arrays: LayerArrays | None = partial.compiled
    storage, projection = partial.storage, partial.projection
    if arrays is None or arrays.storage is not storage or arrays.projection is not projection:
        assert storage.is_contiguous()  # a copy would not see what is written later
        query, key = as_array(projection.query), as_array(projection.key)
        if projection.offset is None:
            offset = np.zeros(key.shape[:3], dtype=np.float32)
        else:
            offset = as_array(projection.offset.squeeze(2))
        arrays = LayerArrays(storage, projection, as_array(storage), query, key, offset)
        partial.compiled = arrays
    return arrays


def value_arrays(values: ValueMap) -> tuple[Array, Array]:
    """Base ``(B, H_kv, D_v)`` and slope ``(B, H_kv, R, D_v)``, float32."""
    arrays: tuple[Array, Array] | None = values.compiled
    if arrays is None:
        arrays = as_array(values.base.squeeze(2)), as_array(values.slope)
        values.compiled = arrays
    return arrays
