"""Whether `generate` uses the cache that it was given, as it was meant: else it is told at once.

Transformers' `generate` feeds the whole text again where a cache is not to be used, models may drop
a cache while they prepare their inputs, and a text that is in the cache already is fed a second
time. None of that is an error there; each would cost the user a wrong text or all that a cache is
for.
"""

from __future__ import annotations

import warnings
import weakref
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from infinigen_kv.cache.contract import EngineCache
from infinigen_kv.errors import CacheStateError, InputError


class GivenCache:
    """The cache that the latest `generate` of a session was given.

    Parameters
    ----------
    rereads_after
        Positions after which the model reads its text anew without the cache
        (`Adapter.rereads_after`), or None.
    """

    def __init__(self, rereads_after: int | None) -> None:
        self._rereads_after = rereads_after
        self._cache: weakref.ref[EngineCache] | None = None
        self._starting = False

    def note(self, cache: EngineCache) -> None:
        """`generate` was called with it; nothing has been read yet."""
        self._cache = weakref.ref(cache)
        self._starting = True

    def check_used(self, cache: EngineCache, kwargs: dict[str, Any], shown: Tensor) -> None:
        """A forward is about to use ``cache``.

        Parameters
        ----------
        kwargs
            Of the decoder.
        shown
            Its token ids or embeddings, ``(B, Q, ...)``.

        Raises
        ------
        InputError
            If the cache is not to be used.
        CacheStateError
            If the first tokens of a `generate` are held by the cache already.
        """
        if kwargs.get("use_cache") is False:
            raise InputError(
                "use_cache=False goes with no cache: every step would read the whole text again. "
                "Leave it out, or set model.generation_config.use_cache (in the checkpoint's "
                "generation_config.json or config.json) to true"
            )
        starting, self._starting = self._starting, False
        held = cache.get_seq_length()
        if not starting or held == 0:
            return
        text = _text_length(kwargs, held + shown.shape[1])
        if text < held + shown.shape[1]:
            raise CacheStateError(
                f"the cache holds {held} tokens, and the text given to generate has {text}, so "
                "that nothing in it is new: give the text so far with new tokens after it, go back "
                "with cache.crop(tokens), or use an empty cache"
            )

    def dropped(self, kwargs: dict[str, Any], shown: Tensor) -> EngineCache | None:
        """A forward is about to run without any cache: the one that `generate` was given, where the
        model has dropped it to read its text anew, emptied for that.

        Raises
        ------
        CacheStateError
            If the model has dropped it for another reason.
        """
        cache = None if self._cache is None else self._cache()
        if cache is None or kwargs.get("use_cache") is not True:
            return None
        held, tokens = cache.get_seq_length(), shown.shape[1]
        limit = self._rereads_after
        if limit is not None and tokens > limit >= held and (self._starting or tokens == held + 1):
            self._starting = False
            if held:
                cache.reset()
            return cache
        if self._starting:
            raise CacheStateError(
                "generate was given a cache, but the model's prepare_inputs_for_generation has "
                "dropped it, so that nothing would be selected: use a shorter prompt, or generate "
                "without the cache"
            )
        return None


def _text_length(kwargs: dict[str, Any], otherwise: int) -> int:
    """Tokens of the longest row, padding included, as generate sees it: by its mask, or by the
    positions that it counts.
    """
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None:
        return int(mask.shape[-1])
    return otherwise if positions is None else int(positions.max()) + 1


def use_given_caches(model: PreTrainedModel, undo: ExitStack) -> None:
    """Let `generate` use the cache that it is given, whatever the checkpoint says of caches.

    A warning names each setting of the model's generation config that is left out until ``undo``.
    """
    config = model.generation_config
    for name, wanted in (("use_cache", True), ("cache_implementation", None)):
        found = getattr(config, name, wanted)
        if found == wanted or (name == "use_cache" and found is not False):
            continue
        warnings.warn(
            f"the model's generation config has {name}={found!r}, which does not go with a cache "
            "that generate is given: it is left out while the model is attached",
            stacklevel=4,
        )
        setattr(config, name, wanted)
        undo.callback(setattr, config, name, found)
