"""The fitted map from one layer's attention input to the next layer's query projection."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-2  # times the mean diagonal of X^T X


def fit_correction(
    input_moment: Tensor,
    cross_moment: Tensor,
    query_weight: Tensor,
    query_bias: Tensor | None,
    rank: int,
) -> tuple[Tensor, Tensor]:
    """Low-rank correction to a query projection, so that it reads the previous layer's input.

    Ridge regression toward the model's own weights,
    ``W = argmin ||[x 1] W - q||^2 + lambda ||W - W_Q||^2``, then reduced-rank regression: the
    rank-r W - W_Q that changes ``[x 1] (W - W_Q)`` least is its projection on the leading right
    singular vectors of ``[X 1] (W - W_Q)``.

    Parameters
    ----------
    input_moment
        ``(M+1, M+1)`` sum of [x 1]^T [x 1] over the sample (x: previous layer's attention input).
    cross_moment
        ``(M+1, N)`` sum of [x 1]^T q, with N = H * D and q the raw projection of this layer.
    query_weight, query_bias
        ``(N, M)`` and ``(N,)`` or None: this layer's own projection.
    rank
        r, at most min(M+1, N).

    Returns
    -------
    tuple of Tensor
        ``down`` ``(M+1, r)`` and ``up`` ``(r, N)``, float32: the predicted query is
        ``x W_Q^T + bias + [x 1] down up``.
    """
    gram = input_moment.double()
    own = torch.zeros(gram.shape[0], query_weight.shape[0], dtype=torch.float64, device=gram.device)
    own[:-1] = query_weight.double().mT
    if query_bias is not None:
        own[-1] = query_bias.double()
    residual = cross_moment.double() - gram @ own
    strength = RIDGE * gram.diagonal().mean()
    ridge = gram + strength * torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
    change = torch.cholesky_solve(residual, torch.linalg.cholesky(ridge))
    _, vectors = torch.linalg.eigh(change.mT @ gram @ change)
    up = vectors[:, -rank:].mT
    return (change @ up.mT).float(), up.float().contiguous()
