"""The Hugging Face cache: joins homes, links and policies, one layer each."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from infinigen_kv.cache.contract import Owner, opaque
from infinigen_kv.cache.faults import is_device_fault
from infinigen_kv.cache.layer import OffloadedLayer
from infinigen_kv.cache.masks import visible_tokens
from infinigen_kv.cache.phase import Phase
from infinigen_kv.cache.statistics import CacheStatistics
from infinigen_kv.errors import CacheStateError, DeviceError
from infinigen_kv.policies.step import Recorder, Step

if TYPE_CHECKING:
    from infinigen_kv.config import InfiniGenConfig
    from infinigen_kv.storage.storage import Storage


class InfiniGenCache(CacheStatistics):
    """KV cache of one batch, for ``model.generate(..., cache=cache)`` on an attached model.

    Layers with full attention are `OffloadedLayer`; sliding layers keep their window in
    Transformers' own layer. Made by `Session.new_cache`.

    Parameters
    ----------
    layers
        One per model layer.
    sources
        For each layer index the offloaded layers whose rehearsal reads that layer's attention
        input.
    config
        The selection's settings.
    owner
        The session; a cache works with no other.
    storage
        What its layers share.
    """

    # A cache of Transformers may hold other kinds of layers too.
    layers: list[OffloadedLayer | DynamicSlidingWindowLayer]  # type: ignore[assignment]

    def __init__(
        self,
        layers: Sequence[OffloadedLayer | DynamicSlidingWindowLayer],
        sources: dict[int, list[int]],
        config: InfiniGenConfig,
        owner: Owner,
        storage: Storage,
    ) -> None:
        super().__init__(layers=list(layers))
        self.storage = storage
        self.config = config
        self.owner = owner
        self.recorder: Recorder | None = None
        self.sources = sources
        heralded = {layer for followers in sources.values() for layer in followers}
        self._unheralded = [layer for layer in self.offloaded if layer.spec.index not in heralded]
        self._step: Step | None = None
        self._thread: threading.Thread | None = None
        self._interrupted = False
        self._lost = False
        self._phase = Phase()

    @property
    def is_interrupted(self) -> bool:
        """Whether a forward failed and could not be taken back; only `reset` helps then."""
        return self._interrupted

    def close(self) -> None:
        """Release all memory, threads and files; the cache is empty then and of no more use."""
        try:
            self.reset()
        finally:
            self.storage.close()

    def expect_prompt(self, tokens: int) -> None:
        """Say that the cache's first ``tokens`` tokens are prompt, however they arrive.

        A forward of one token on top of others is otherwise a decode step, and may select. Needed
        only by callers who feed a prompt in chunks of which the last may hold a single token.
        """
        self._phase.expect_prompt(tokens)
        self.storage.expect(tokens)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Inside the block every forward selects for each of its tokens, as single steps would.

        The first forward of an empty cache is exact all the same: it is what a rehearsal learns
        from.
        """
        with self._phase.decoding():
            yield

    def tokens_of_piece(self, queries: int) -> int:
        """Up to the end of the prompt, or to the next refit where the tokens select."""
        start = self.get_seq_length()
        limit: int | None = self._phase.until_decoding(start) or None
        if limit is None and queries > 1 and self._phase.decodes(start, queries):
            each = [layer.policy.until_refit(start) for layer in self.offloaded]
            limit = min((tokens for tokens in each if tokens is not None), default=None)
        return queries if limit is None else min(limit, queries)

    def expect_verification(self, tokens: int, drafts: int) -> None:
        """The first forward of assisted decoding holds the prompt, too, which does not select."""
        if self._phase.awaits_drafts and 0 < drafts < tokens:
            self.expect_prompt(self.get_seq_length() + tokens - drafts)

    def begin_forward(
        self, *, queries: int, rows: int, attention_mask: Tensor | None, position_ids: Tensor
    ) -> None:
        """The model starts a forward of ``queries`` new tokens in ``rows`` rows."""
        self._settle()
        self._check_usable(rows)
        start = self.get_seq_length()
        self._step = Step(
            start=start,
            queries=queries,
            rows=rows,
            visible=visible_tokens(attention_mask, rows, start + queries),
            position_ids=position_ids,
            selecting=self._phase.decodes(start, queries),
            config=self.config,
            recorder=self.recorder,
            prompt_ends=self._phase.ends_prompt(start, queries),
            drafts=self._phase.verifies_drafts,
        )
        if self._step.selecting and queries > 1:
            self._check_room(queries)
        self._thread = threading.current_thread()
        for layer in self.offloaded:
            layer.begin(self._step)

    def attention_input(self, index: int, hidden: Tensor) -> OffloadedLayer | None:
        """Layer ``index`` is about to attend to ``hidden`` ``(B, Q, M)``: rehearse who reads that.

        Returns the layer itself where it is offloaded.
        """
        for follower in self.sources.get(index, ()):
            reader = self.layers[follower]
            assert isinstance(reader, OffloadedLayer)
            reader.rehearse(hidden)
        if index == len(self.layers) - 1:
            self.prefetch_unheralded()
        layer = self.layers[index]
        return layer if isinstance(layer, OffloadedLayer) else None

    def prefetch_unheralded(self) -> None:
        """Start to move what layers without a predecessor will want in the next decode step."""
        for layer in self._unheralded:
            layer.prefetch_next()

    @opaque
    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Add new tokens to a layer; the model calls it, between `begin_forward` and its end."""
        if self._step is None or self.owner.closed:
            raise CacheStateError(
                "this cache only works with the model that it was made for, inside "
                "`with attach(model, ...) as session`; make one there with session.new_cache()"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def end_forward(self, *, finished: bool) -> None:
        """The forward is over; if it failed, the tokens that it added are taken back."""
        # a second forward that was refused ends too, and must not end the first one with it
        if self._step is not None and self._thread is threading.current_thread():
            if not finished and is_device_fault(sys.exc_info()[1]):
                self._abandon()
            else:
                self._close_step(finished)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held, those of an unfinished forward left out."""
        return super().get_seq_length(layer_idx) if self._step is None else self._step.start

    def reset(self) -> None:
        """Empty the cache; also makes an interrupted one usable again."""
        self.restart()
        self._phase.reset()

    def restart(self) -> None:
        """Empty the cache for its text to be read anew; drafts that were announced still follow."""
        if self._step is not None:
            self._close_step(finished=False)
        super().reset()
        self._interrupted = False
        self._phase.cropped(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``-tokens_to_remove`` tokens; a positive one is the length to keep."""
        self._settle()
        length = self.get_seq_length()
        keep = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
        removed = length - min(max(keep, 0), length)
        if 0 < removed < length and not all(layer.is_croppable for layer in self.offloaded):
            raise CacheStateError(
                f"cannot go back from {length} to {keep} tokens, since others were evicted at the "
                f"capacity of {self.storage.config.capacity}: start again with an empty cache, or "
                "set no capacity"
            )
        # sliding layers first: they refuse what they cannot undo, and then nothing has changed
        for layer in sorted(self.layers, key=lambda layer: not layer.is_sliding):
            layer.crop(-removed)
        self._phase.cropped(self.get_seq_length())

    @torch.inference_mode(False)  # a copy that is made inside of it may be used outside
    def __deepcopy__(self, memo: dict[int, Any]) -> InfiniGenCache:
        """A copy of the KV for the same session, to continue one prompt in several ways."""
        self._settle()
        if not self.storage.config.kind.is_copyable:
            raise CacheStateError(
                f"a cache on {self.storage.config.home} cannot be copied: read the prompt again"
            )
        shared = [self.owner, self.config, self.storage, self.storage.link]
        shared += [layer.spec for layer in self.offloaded]
        memo.update({id(each): each for each in shared})
        made = object.__new__(type(self))
        memo[id(self)] = made
        own = {name: value for name, value in vars(self).items() if name != "recorder"}
        made.__dict__.update(copy.deepcopy(own, memo), recorder=None)
        return made

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Become the rows ``beam_idx`` ``(n,)`` of this batch."""
        self._settle()
        super().reorder_cache(cast(torch.LongTensor, beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, one after the other."""
        self._settle()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, numbers or a boolean mask."""
        self._settle()
        super().batch_select_indices(indices)

    def activate_past_recording(self) -> None:
        """Assisted decoding starts: short forwards after the next one verify drafts."""
        super().activate_past_recording()
        self._phase.expect_drafts()

    def _settle(self) -> None:
        """Take back what an interrupted forward added.

        PyTorch calls hooks after an exception, but not after KeyboardInterrupt and the like. A
        forward is over for sure when its own thread asks for something else, or has ended.
        """
        if self._step is None or self._thread is None:
            return
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            raise CacheStateError("this cache is in the middle of another forward")
        self._close_step(finished=False)

    def _close_step(self, finished: bool) -> None:
        step, self._step, self._thread = self._step, None, None
        assert step is not None
        step.release()
        for layer in self.offloaded:
            layer.begin(None)
        if finished:
            self._phase.finished(step.start, step.queries)
            return
        broken, self._interrupted = self._interrupted, True  # unless all layers go back
        for each in self.layers:
            if isinstance(each, OffloadedLayer):
                broken |= not each.take_back(step.start)
            elif step.start == 0:
                each.reset()
            else:  # a sliding layer has dropped what it would need to go back
                broken |= each.get_seq_length() != step.start
        self._interrupted = broken

    def _abandon(self) -> None:
        """The device is gone: nothing can be taken back, so let go of memory, threads and files."""
        self._step, self._thread = None, None
        self._lost = True
        for layer in self.offloaded:
            layer.abandon()
        self.storage.close()

    def _check_room(self, queries: int) -> None:
        """Several queries select by position, which slots of a full home are not."""
        free = [pool.free for pool in self._pools if pool.free is not None]
        if free and min(free) < queries:
            self._step = None
            raise CacheStateError(
                f"a forward of {queries} tokens cannot select once tokens are evicted (capacity "
                f"{self.storage.config.capacity}): feed one token at a time, or set no capacity"
            )

    def _check_usable(self, rows: int) -> None:
        if self._lost:
            raise DeviceError(
                "the device of this cache stopped working and its KV is lost: read the prompt into "
                "a new cache on a device that works"
            )
        if self._interrupted:
            raise CacheStateError(
                "a forward with this cache was interrupted, and its sliding or evicting layers, "
                "or those on a disk that failed, cannot go back: call reset() and start again"
            )
        held = {layer.rows for layer in self.offloaded if layer.rows is not None}
        if held and held != {rows}:
            raise CacheStateError(
                f"the cache holds {held.pop()} rows but the forward has {rows}: use a cache of "
                "its own for each batch"
            )
