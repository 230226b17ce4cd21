"""A cache that `generate` is given is used as it was meant, or refused.

Models may drop a cache, or put another in its place, while they prepare their inputs, and
Transformers feeds a text that is in the cache already a second time. None of that is an error
there; each would cost the user a wrong text, or all that a cache is for.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import update_wrapper
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.cache.contract import CACHE_NAMES
from infinigen_kv.errors import CacheStateError, SettingLeftOut

PREPARE = "prepare_inputs_for_generation"


class InputPreparation:
    """A model's `prepare_inputs_for_generation` that keeps the cache that it is given.

    The one place where both can be seen, for every forward of `generate` and for no other.

    Parameters
    ----------
    model
        The model.
    rereads_after
        Positions after which the model reads its text anew without the cache
        (`Adapter.rereads_after`), or None.
    """

    def __init__(self, model: PreTrainedModel, rereads_after: int | None) -> None:
        self._model = model
        self._rereads_after = rereads_after
        self._prepare: Callable[..., dict[str, Any]] = getattr(model, PREPARE)
        self._signature = inspect.signature(self._prepare)
        update_wrapper(self, self._prepare)  # generate asks for the parameters

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Inputs of the next forward.

        Raises
        ------
        CacheStateError
            If the model does not use the cache, or nothing in the text is new to it.
        """
        inputs = self._prepare(*args, **kwargs)
        given = {**self._signature.bind_partial(*args).arguments, **kwargs}
        for name in CACHE_NAMES:
            cache = given.get(name)
            if not isinstance(cache, InfiniGenCache):
                continue
            is_used = inputs.get(name) is cache
            if not is_used:
                self._take_back(inputs, cache)
                inputs[name] = cache
            elif given.get("is_first_iteration"):
                _check_new(inputs, cache)
        return inputs

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._model, PREPARE)  # the copy of a model gets its own, plain one

    def _take_back(self, inputs: Mapping[str, Any], cache: InfiniGenCache) -> None:
        """The model has dropped the cache: make it fit to be used all the same.

        It does where the model drops it to read the whole text with other rotary factors.
        """
        held, tokens = cache.get_seq_length(), _new_tokens(inputs)
        limit = self._rereads_after
        rereads = limit is not None and held <= limit < tokens
        if not rereads or _text_length(inputs, tokens) != tokens:
            raise CacheStateError(
                f"generate was given a cache of {held} tokens, but the model's {PREPARE} does not "
                f"use it for the next {tokens} tokens, so that nothing would be selected: give an "
                "empty cache and the whole text without prefill_chunk_size, use a shorter text, or "
                "generate without the cache"
            )
        if held:
            cache.restart()


def _check_new(inputs: Mapping[str, Any], cache: InfiniGenCache) -> None:
    """That the text which `generate` was called with goes on where the cache ends."""
    held, tokens = cache.get_seq_length(), _new_tokens(inputs)
    if held and _text_length(inputs, tokens, held + tokens) < held + tokens:
        raise CacheStateError(
            f"the cache holds {held} tokens, and the text given to generate has none after them: "
            "give the text so far with new tokens after it, or new tokens alone with an "
            "attention_mask of all; else go back with cache.crop(tokens), or use an empty cache"
        )


def _new_tokens(inputs: Mapping[str, Any]) -> int:
    """Tokens that the forward reads, per row."""
    shown = inputs.get("inputs_embeds")
    return int((inputs["input_ids"] if shown is None else shown).shape[1])


def _text_length(inputs: Mapping[str, Any], tokens: int, otherwise: int = 0) -> int:
    """Tokens of the longest row up to the forward's last one, padding included, as generate counts
    them: by its mask, or by the positions; 0 where these end before its ``tokens``.
    """
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if isinstance(mask, Tensor):
        return int(mask.shape[-1])
    if positions is None:
        return otherwise
    return int(positions.max()) + 1 if positions.shape[-1] >= max(tokens, 1) else 0


def keep_given_caches(model: PreTrainedModel, rereads_after: int | None, undo: ExitStack) -> None:
    """Let `generate` use the cache that it is given, whatever model and checkpoint do with caches.

    Until ``undo``. A warning names each setting of the model's generation config that is left out.
    """
    if not model.can_generate():
        return
    _leave_out_settings(model.generation_config, undo)
    before = vars(model).get(PREPARE)
    preparation = InputPreparation(model, rereads_after)
    if before is None:
        undo.callback(delattr, model, PREPARE)
    else:  # a user's own
        undo.callback(setattr, model, PREPARE, before)
    setattr(model, PREPARE, preparation)


def _leave_out_settings(config: Any, undo: ExitStack) -> None:
    for name, neutral in (("use_cache", True), ("cache_implementation", None)):
        setting = getattr(config, name, None)
        if setting is None or setting == neutral:
            continue
        warnings.warn(
            f"the model's generation config has {name}={setting!r}, which does not go with a cache "
            "that generate is given: it is left out while the model is attached",
            SettingLeftOut,
            stacklevel=5,
        )
        undo.callback(setattr, config, name, setting)
        setattr(config, name, neutral)
