"""Windows of text that settings are tuned on, and others that they are checked on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from infinigen_kv.errors import InputError


@dataclass(frozen=True, slots=True)
class Window:
    """Token ids: ``prompt`` ``(P,)`` is attended to in full, ``decoded`` ``(T,)`` selects."""

    prompt: Tensor
    decoded: Tensor


def split_windows(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    prompt_tokens: int,
    decode_tokens: int,
    count: int,
    device: torch.device,
) -> tuple[list[Window], list[Window]]:
    """``count`` windows to tune on and as many others, spread over the texts, none twice.

    Raises
    ------
    InputError
        If the texts have too few tokens for two windows.
    """
    ids = [token for text in texts for token in tokenizer(text, verbose=False)["input_ids"]]
    length = prompt_tokens + decode_tokens
    there = len(ids) // length
    if there < 2:
        raise InputError(
            f"the text has {len(ids)} tokens: it must have at least {2 * length}, one window of "
            f"{length} to tune on and one to check with; give a longer text or fewer prompt tokens"
        )
    count = min(count, there // 2)
    # every second one is held back, so that both halves come from all parts of the text
    places = [int(at * there / (2 * count)) for at in range(2 * count)]
    windows = []
    for place in places:
        window = torch.tensor(ids[place * length : (place + 1) * length], device=device)
        windows.append(Window(window[:prompt_tokens], window[prompt_tokens:]))
    return windows[::2], windows[1::2]
