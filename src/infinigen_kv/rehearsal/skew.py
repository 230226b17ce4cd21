"""The paper's skew and its partial columns (OSDI 2024, section 4.2 and 4.3)."""

from __future__ import annotations

import torch
from torch import Tensor


def skew_matrix(query_moment: Tensor) -> Tensor:
    """Orthogonal A of the paper: the right singular vectors of a sample's queries.

    With Q = U S V^T (equation 2 of the paper) A = V, and V are the eigenvectors of Q^T Q, largest
    first, so only the D x D moment of the sample is needed.

    Parameters
    ----------
    query_moment
        ``(..., D, D)`` sum of q q^T over the sample's queries.

    Returns
    -------
    Tensor
        ``(..., D, D)`` float32, columns ordered by falling singular value.
    """
    _, vectors = torch.linalg.eigh(query_moment.double())
    return vectors.flip(-1).float()


def partial_columns(query_magnitude: Tensor, key_magnitude: Tensor, rank: int) -> Tensor:
    """Columns with the largest sum of absolute queries and keys (paper, section 4.3).

    Parameters
    ----------
    query_magnitude, key_magnitude
        ``(..., D)`` sums over the prompt of ``|q A|`` and ``|k A|``.
    rank
        Number of columns R to keep.

    Returns
    -------
    Tensor
        ``(..., R)`` int64 column indices, ascending.
    """
    total = query_magnitude + key_magnitude
    return total.topk(rank, dim=-1).indices.sort(dim=-1).values


def take_columns(matrix: Tensor, columns: Tensor) -> Tensor:
    """Columns of ``(..., D, D)`` chosen per leading index by ``(..., R)``: ``(..., D, R)``."""
    wide = columns.unsqueeze(-2).expand(*columns.shape[:-1], matrix.shape[-2], columns.shape[-1])
    return matrix.expand(*columns.shape[:-1], *matrix.shape[-2:]).gather(-1, wide)
