"""What compiled code reads of a layer at every step and changes only where it is fitted anew."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from infinigen_kv.kernels.native.arrays import Array, as_array
from infinigen_kv.rehearsal.coded_partial_keys import CodedPartialKeys
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.projection import Projection
from infinigen_kv.rehearsal.tail import ValueMap


class Codes(NamedTuple):
    """Lines ``(B, H_kv, groups, bytes)`` uint8 and grids ``(B, H_kv, groups, 2, R)`` of a layer's
    codes (`rehearsal.codes`), how many dimensions have 4 and 3 bits, and how many tokens are coded.
    """

    lines: Array
    grids: Array
    fours: int
    threes: int
    tokens: int


NO_CODES = Codes(np.zeros((0,) * 4, dtype=np.uint8), np.zeros((0,) * 5, dtype=np.uint16), 0, 0, 0)


class LayerArrays(NamedTuple):
    """The partial keys of a layer and the projection that made them.

    ``keys`` ``(B, H_kv, R, capacity)`` shares memory with ``storage``, and has the tokens after
    those of ``codes``; ``query`` and ``key`` are ``(B, H_kv, D, R)``, ``offset`` and ``height``
    ``(B, H_kv, D)``, float32.
    """

    storage: Tensor
    projection: Projection
    keys: Array
    query: Array
    key: Array
    offset: Array
    height: Array
    codes: Codes

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Nothing: the arrays of copied partial keys are made of their own memory."""


def arrays_of(partial: PartialKeys) -> LayerArrays:
    """Of these partial keys; made again where they moved or have another projection."""
    arrays: LayerArrays | None = partial.compiled
    storage, projection = partial.storage, partial.projection
    if arrays is None or arrays.storage is not storage or arrays.projection is not projection:
        assert storage.is_contiguous()  # a copy would not see what is written later
        query, key = as_array(projection.query), as_array(projection.key)
        offset = height = np.zeros(key.shape[:3], dtype=np.float32)
        if projection.offset is not None and projection.height is not None:
            offset, height = (
                as_array(each.squeeze(2)) for each in (projection.offset, projection.height)
            )
        keys, codes = as_array(storage), _codes(partial)
        arrays = LayerArrays(storage, projection, keys, query, key, offset, height, codes)
        partial.compiled = arrays
    return arrays


def _codes(partial: PartialKeys) -> Codes:
    if not isinstance(partial, CodedPartialKeys):
        return NO_CODES
    lines, grids = partial.codes, partial.grids
    assert lines.is_contiguous() and grids.is_contiguous()
    fours, threes, _ = partial.layout
    return Codes(as_array(lines), as_array(grids), fours, threes, partial.coded)


def value_arrays(values: ValueMap) -> tuple[Array, Array]:
    """Base ``(B, H_kv, D_v)`` and slope ``(B, H_kv, R, D_v)``, float32."""
    arrays: tuple[Array, Array] | None = values.compiled
    if arrays is None:
        arrays = as_array(values.base.squeeze(2)), as_array(values.slope)
        values.compiled = arrays
    return arrays
