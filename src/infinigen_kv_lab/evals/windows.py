"""How long the windows of a text are, and how much of each is prompt."""

from __future__ import annotations

from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.task import Inputs

DEFAULT_WINDOW = 3072


def split_window(inputs: Inputs) -> tuple[int, int]:
    """Tokens of a window and of its prompt, from the options and the model's positions.

    Raises
    ------
    InputError
        If the window is longer than the model's positions.
    """
    asked, limit = inputs.options.window, inputs.max_positions
    if asked is not None and limit is not None and asked > limit:
        raise InputError(
            f"a window of {asked} tokens is longer than the model's {limit} positions: choose a "
            "smaller one"
        )
    window = asked or min(DEFAULT_WINDOW, limit or DEFAULT_WINDOW)
    prompt = inputs.options.prompt_tokens or window * 2 // 3
    if prompt >= window:
        raise InputError(
            f"prompt_tokens={prompt} leaves no tokens after the prompt in a window of {window}: "
            "choose a shorter prompt or a longer window"
        )
    return window, prompt
