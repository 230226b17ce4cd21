"""Bytes that InfiniGen's policy holds for one layer.

The classes that allocate them are asked themselves, with tensors on PyTorch's ``meta`` device,
which have shapes but no memory: so their rules of growth and rounding are in one place.
"""

from __future__ import annotations

import math
from dataclasses import fields

import torch
from torch import Tensor

from infinigen_kv.policies.entry import PolicyBytes, PolicyShape
from infinigen_kv.rehearsal.checkpoints import KEPT
from infinigen_kv.rehearsal.coded_partial_keys import make_partial_keys
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.projection import TOKEN_BLOCK, Projection
from infinigen_kv.rehearsal.recent import MAX_WAITING, MIN_WAITING
from infinigen_kv.rehearsal.statistics import Magnitudes, Moments, PromptStatistics
from infinigen_kv.rehearsal.tail import ValueMap

META = torch.device("meta")


def infinigen_bytes(shape: PolicyShape) -> PolicyBytes:
    """Partial keys with the tail's value map; sums, projections, correction, waiting tokens."""
    keys = _keys(shape)
    corrected = shape.copied_query
    if shape.config.rehearsal == "paper":
        skew = _numbers(shape.kv_heads, shape.head_dim, shape.head_dim)
        # on a CPU the skew is the calibration's own
        statistics: PromptStatistics = Magnitudes.start(keys, skew)
        sums = _held_bytes(statistics) - (skew.nbytes if shape.shares_memory else 0)
    else:
        statistics = Moments.start(keys, keys if shape.config.tail else None)
        sums = _held_bytes(statistics)
        # `QueryPredictor`: down and up
        corrected += shape.rank * (shape.hidden_size + 1 + shape.heads * shape.head_dim)
    projection = _projection(shape)
    sums += _held_bytes(projection) + _checkpoints(shape) * statistics.query_sums.nbytes
    recent = _recent(shape)
    more = max(0, min(shape.chunk, MAX_WAITING) - recent)  # at the end of the prompt
    waiting = _waiting(shape, recent)
    return PolicyBytes(
        partial_keys=_partial_keys(shape, projection),
        rehearsal=sums + (corrected + waiting) * shape.dtype.itemsize,
        prefill=_waiting(shape, more) * shape.dtype.itemsize,
    )


def _waiting(shape: PolicyShape, tokens: int) -> int:
    """Numbers of so many `RecentTokens`: queries, keys and values."""
    return shape.rows * tokens * (shape.heads + 2 * shape.kv_heads) * shape.head_dim


def _recent(shape: PolicyShape) -> int:
    """Tokens that wait to be summed while others are decoded."""
    prompt = shape.prompt_tokens
    if not shape.config.refit_every:
        return min(prompt, MIN_WAITING)
    return min(MAX_WAITING, shape.new_tokens + (prompt if prompt < MAX_WAITING else MIN_WAITING))


def _checkpoints(shape: PolicyShape) -> int:
    """Lengths of the prompt at which `RunningStatistics` keeps the queries' sums."""
    forwards = math.ceil(shape.prompt_tokens / shape.chunk)
    blocks = math.ceil(max(1, shape.chunk - MAX_WAITING) / TOKEN_BLOCK)
    return min(KEPT, forwards * blocks)


def _projection(shape: PolicyShape) -> Projection:
    rank = shape.config.partial_dim(shape.head_dim)
    matrix = _numbers(shape.rows, shape.kv_heads, shape.head_dim, rank)
    if shape.config.rehearsal == "paper":
        return Projection(matrix, matrix, None)
    offset = matrix[..., :1].mT
    level = None
    if shape.config.index_bits is not None and shape.config.refit_every and shape.new_tokens:
        level = torch.empty_like(offset)  # of `CodedPartialKeys.refitted`
    return Projection(matrix, torch.empty_like(matrix), torch.empty_like(offset), level)


def _partial_keys(shape: PolicyShape, projection: Projection) -> int:
    """Made of the prompt, or once a row is long enough, then appended to."""
    prompt, least = shape.prompt_tokens, shape.config.min_context
    if least > shape.context:
        return 0
    first = prompt if prompt >= least else min(least, shape.slots)
    partial: PartialKeys
    if shape.config.index_bits is None:
        partial = PartialKeys(_keys(shape, first), projection, empty=True)
        partial.extend(first)
    else:
        partial = make_partial_keys(shape.config, _keys(shape, first), projection)
    while partial.capacity < min(shape.context, shape.slots):
        partial.reserve(partial.capacity + 1)  # one by one as a rule
    if not shape.config.tail:
        return partial.nbytes
    rank = projection.key.shape[3]
    slope = _numbers(shape.rows, shape.kv_heads, rank, shape.head_dim)
    return partial.nbytes + ValueMap(slope[:, :, :1], slope).nbytes


def _keys(shape: PolicyShape, tokens: int = 1) -> Tensor:
    """Keys of so many tokens, ``(B, H_kv, tokens, D)``."""
    sizes = shape.rows, shape.kv_heads, tokens, shape.head_dim
    return torch.empty(sizes, dtype=shape.dtype, device=META)


def _numbers(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.float32, device=META)


def _held_bytes(holder: object) -> int:
    """Bytes of a dataclass of tensors, and of such dataclasses; shared ones once."""
    values = [getattr(holder, field.name) for field in fields(holder)]  # type: ignore[arg-type]
    sizes = {
        id(value): value.nbytes if isinstance(value, Tensor) else _held_bytes(value)
        for value in values
        if value is not None
    }
    return sum(sizes.values())
