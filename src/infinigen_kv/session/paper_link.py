"""The link of ``emulated:paper``: how fast it has to be for a model, measured."""

from __future__ import annotations

import copy
import statistics

import torch
from torch import Tensor

from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.cache.forward import prefill, timed_forward
from infinigen_kv.session.attach import Session
from infinigen_kv.storage.link import paper_rate

PACED = 16  # steps that the rate is set by, a quarter of them to warm up


@torch.no_grad()
def paper_link_rate(session: Session, *, context: int, rows: int = 1) -> float:
    """Rate of ``emulated:paper`` for a model: one layer's KV in 18.5 times one block's computation.

    Reads ``context`` arbitrary tokens into an in-memory cache first, which takes as long as a
    prompt; fewer where the model has no positions left for the measured steps.
    """
    if session.adapter.max_positions is not None:
        context = max(1, min(context, session.adapter.max_positions - PACED))
    ids = torch.ones(rows, context, dtype=torch.long, device=session.model.device)
    cache = session.new_cache(tokens=context + PACED + 1, policy="ideal")
    prefill(session, cache, ids)
    try:
        return balanced_rate(session, cache, ids)
    finally:
        cache.close()


def balanced_rate(session: Session, ideal: InfiniGenCache, prompt: Tensor) -> float:
    """As `paper_link_rate`, on an ideal cache that holds ``prompt`` ``(B, P)``, and still does."""
    length = ideal.get_seq_length()
    probe = copy.deepcopy(ideal)  # sliding layers could not take the tokens back
    limit = session.adapter.max_positions
    steps = PACED if limit is None else max(1, min(PACED, limit - length))
    times = [timed_forward(session.model, prompt[:, -1:], probe)[1] for _ in range(steps)]
    block = statistics.median(times[steps // 4 :]) / 1e3 / len(session.adapter.layers)
    spec = next(spec for spec in session.adapter.layers if not spec.is_sliding)
    dtype = session.model.dtype
    entry = 2 * spec.head_dim * spec.num_kv_heads * dtype.itemsize
    return paper_rate(prompt.shape[0] * length * entry, block)
