"""The arithmetic of a decode step in plain PyTorch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from infinigen_kv.attention.dense import decode_attention, decode_weights
from infinigen_kv.attention.entries import Entries
from infinigen_kv.kernels.base import Kernels
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.select import Candidates, Selection, select_tokens
from infinigen_kv.rehearsal.tail import Tail, attention_with_tail


class TorchKernels(Kernels):
    """Plain PyTorch, on any device: the reference."""

    name = "torch"

    def select(
        self,
        query: Tensor,
        keys: PartialKeys,
        candidates: Candidates,
        *,
        scaling: float,
        alpha: float,
        softcap: float | None,
    ) -> Selection:
        return select_tokens(keys.scores(query, scaling, softcap), candidates, alpha)

    def attend(
        self,
        query: Tensor,
        entries: Entries,
        counts: Tensor | None,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        softcap: float | None,
        weighed: bool = False,
        tail: Tail | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        moved_keys, moved_values = entries.gather()
        all_keys = torch.cat([moved_keys, keys], dim=2)
        all_values = torch.cat([moved_values, values], dim=2)
        visible = None if counts is None else _meant_and_own(counts, moved_keys)
        if tail is not None:
            assert not weighed
            output = attention_with_tail(
                query, all_keys, all_values, visible, tail.partial, tail.values, tail.hidden(),
                scaling=scaling, softcap=softcap,
            )  # fmt: skip
            return output, None
        output = decode_attention(
            query, all_keys, all_values, scaling=scaling, softcap=softcap, visible=visible
        )
        if not weighed:
            return output, None
        return output, decode_weights(
            query, all_keys, scaling=scaling, softcap=softcap, visible=visible
        )


def _meant_and_own(counts: Tensor, moved: Tensor) -> Tensor:
    """Columns of moved entries that count, and the query's own: ``(B, 1, 1, n + 1)``."""
    columns = moved.shape[2]
    places = torch.arange(columns + 1, device=moved.device)
    visible = (places < counts.to(moved.device)) | (places == columns)
    return visible[:, None, None, :]
