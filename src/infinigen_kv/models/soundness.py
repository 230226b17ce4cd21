"""A model that computes NaN is refused: what it says, and figures of that, would look right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from infinigen_kv.errors import InfiniGenError, InputError
from infinigen_kv.models.adapters.base import Adapter


def check_logits(logits: Tensor) -> None:
    """Raise `InfiniGenError` if logits ``(..., V)`` contain NaN or infinity.

    Tokens that a model rules out with -infinity are none of its faults.
    """
    if not bool(logits.amax(dim=-1).isfinite().all()):  # the largest is NaN where any is
        raise _unsound("logits")


def check_known(ids: Tensor, model: PreTrainedModel) -> None:
    """Raise `InputError` if a token of ``ids`` has no embedding in the model."""
    embeddings: Any = model.get_input_embeddings()
    known = embeddings.num_embeddings
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < known:
        raise InputError(
            f"token ids from {int(ids.min())} to {int(ids.max())} are not valid: the model knows 0 "
            f"to {known - 1}; use the tokenizer that belongs to it"
        )


class SoundLogits(LogitsProcessor):
    """Lets ``generate`` go on from sound logits only; they are left as they are."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits ``(B, V)`` of the next token."""
        check_logits(scores)
        return scores


def check_weights(adapter: Adapter) -> None:
    """Raise `InfiniGenError` if a weight of the model's decoder is NaN or infinite.

    Reads each of them once, as a decode step does.
    """
    for name, weight in adapter.decoder.named_parameters():
        if weight.numel() == 0 or not weight.is_floating_point() or weight.itemsize == 1:
            continue
        extremes = torch.stack(weight.detach().aminmax())  # NaN where any number is
        if not bool(extremes.isfinite().all()):
            raise _unsound("weights", f" (in {name})")


def read_window(adapter: Adapter, window: Tensor) -> None:
    """Let the model's decoder read ``window`` ``(n,)``, for those who look into it meanwhile.

    Raises
    ------
    InfiniGenError
        If it computes NaN or infinity.
    """
    hidden = adapter.decoder(input_ids=window[None], use_cache=False).last_hidden_state
    if not bool(hidden.isfinite().all()):
        raise _unsound("hidden states")


def _unsound(what: str, where: str = "") -> InfiniGenError:
    return InfiniGenError(
        f"the model's {what} contain NaN or infinity{where}, so it cannot be used; check the "
        "model's weights and dtype (float16 may overflow where bfloat16 does not)"
    )
