"""The rank-R score with the least expected squared error, from a prompt's own moments."""

from __future__ import annotations

import torch
from torch import Tensor

EIGENVALUE_FLOOR = 1e-4  # of the largest: directions that the prompt never used stay invertible


def best_projections(
    query_moment: Tensor, key_covariance: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """Projections B, C such that (q B)(k C)^T approximates q k^T best in expectation.

    For queries with second moment S_q and centred keys with covariance S_k, the error
    E[(q (I - B C^T) k^T)^2] is least for ``S_q^(1/2) S_k^(1/2) = U s V^T``,
    ``B = S_q^(-1/2) U_R s_R^(1/2)``, ``C = S_k^(-1/2) V_R s_R^(1/2)`` (Eckart and Young on the
    whitened product). A common factor of S_q or S_k cancels in B C^T, so sums serve as well as
    means. At R = D the score is exact.

    Parameters
    ----------
    query_moment
        ``(..., D, D)`` sum of q q^T, any positive scale.
    key_covariance
        ``(..., D, D)`` covariance of the keys about their mean, any positive scale. (A constant key
        offset adds one number to every token's score and so cannot change a selection.)
    rank
        R, at most D.

    Returns
    -------
    tuple of Tensor
        B and C, each ``(..., D, R)`` float32.
    """
    query_root, query_inverse = _symmetric_roots(query_moment)
    key_root, key_inverse = _symmetric_roots(key_covariance)
    left, scale, right = torch.linalg.svd(query_root @ key_root)
    root_scale = scale[..., None, :rank].sqrt()
    query_projection = query_inverse @ left[..., :rank] * root_scale
    key_projection = key_inverse @ right.mT[..., :rank] * root_scale
    return query_projection.float(), key_projection.float()


def _symmetric_roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Square root and inverse square root of ``(..., D, D)``, eigenvalues floored; float64.

    Of the moment scaled to a largest eigenvalue of 1, which no score depends on. A moment of
    nothing (the keys of a single token do not vary) counts as the identity.
    """
    values, vectors = torch.linalg.eigh(moment.double())
    largest = values[..., -1:]
    relative = torch.where(largest > 0, values / largest, 1.0)
    root = relative.clamp_min(EIGENVALUE_FLOOR).sqrt()
    return (vectors * root.unsqueeze(-2)) @ vectors.mT, (vectors / root.unsqueeze(-2)) @ vectors.mT
