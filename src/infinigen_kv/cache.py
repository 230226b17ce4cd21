"""The Hugging Face cache: joins homes, links and policies, one layer each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from infinigen_kv.attention import decode_attention, dense_attention, grouped_scores
from infinigen_kv.errors import CacheStateError, InputError
from infinigen_kv.link import Link, Transfer
from infinigen_kv.policies import Policy
from infinigen_kv.pool import Home, RamHome
from infinigen_kv.rehearsal.select import Selection, selection_mask
from infinigen_kv.step import Recorder, Step

if TYPE_CHECKING:
    from infinigen_kv.adapters.base import LayerSpec
    from infinigen_kv.config import InfiniGenConfig

LONGEST_DRAFT = 64  # tokens; what assisted decoding verifies at once stays below


class OffloadedLayer(CacheLayerMixin):
    """One layer whose KV lives in a home and is attended to through a policy."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, spec: LayerSpec, policy: Policy, link: Link, capacity: int) -> None:
        super().__init__()
        self.spec = spec
        self.policy = policy
        self._link = link
        self._capacity = capacity
        self._home: Home | None = None
        self._step: Step | None = None
        self._chosen: tuple[Selection, Transfer] | None = None

    @property
    def rows(self) -> int | None:
        """Batch rows held, None while empty."""
        return None if self._home is None else self._home.rows

    @property
    def home_bytes(self) -> int:
        """Bytes reserved in the home."""
        return 0 if self._home is None else self._home.nbytes

    # What the engine calls during a forward, in this order.

    def begin(self, step: Step | None) -> None:
        """Start a forward, or end it with None."""
        self._step = step
        self._chosen = None

    def rehearse(self, hidden: Tensor) -> None:
        """Choose this layer's entries from the previous layer's input and start to move them."""
        step = self._step
        assert step is not None
        if not step.selecting or self._home is None:
            return
        selection = self.policy.rehearse(hidden, step, self._home)
        if selection is not None:
            slots = selection.index.squeeze(2)
            self._chosen = selection, self._link.fetch(self._home, slots)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add new tokens to the home; returns them alone, since `attend` reads the rest."""
        if self._step is None:
            raise CacheStateError(
                "this cache only works with the model that it was made for, inside "
                "`with attach(model, ...) as session`; make one there with session.new_cache()"
            )
        if self._home is None:
            self.lazy_initialization(key_states, value_states)
        assert self._home is not None
        self._home.append(key_states, value_states)
        return key_states, value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._home = RamHome(key_states, value_states, self._capacity)
        self.is_initialized = True

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        *,
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        """Attention of the new tokens; shapes as in `attention.dense_attention`.

        ``keys`` and ``values`` are those of the new tokens, already in the home.
        """
        step, home, chosen = self._step, self._home, self._chosen
        assert step is not None and home is not None
        self._chosen = None
        self.policy.observe(query, keys, step, home)
        if chosen is not None:
            selection, transfer = chosen
            output = _attend_selected(query, keys, values, selection, transfer, scaling, softcap)
            if step.recorder is not None:
                step.recorder.record(self.spec.index, step, selection, None)
            return output
        wide = step.selecting and step.queries > 1
        if wide and (picked := self.policy.select(step, home)) is not None:
            mask = _with_new_tokens(selection_mask(picked, step.start + step.queries), step)
        else:
            picked = None
        all_keys, all_values = home.all()
        if step.recorder is not None:
            wanted = step.recorder.needs_scores and picked is not None
            scores = grouped_scores(query, all_keys, scaling, softcap) if wanted else None
            step.recorder.record(self.spec.index, step, picked, scores)
        return dense_attention(
            query, all_keys, all_values, scaling=scaling, softcap=softcap, mask=mask
        )

    # The interface of a Transformers cache layer.

    def get_seq_length(self) -> int:
        return 0 if self._home is None else self._home.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``-tokens_to_remove`` tokens; a positive number is the length to
        keep.
        """
        length = self.get_seq_length()
        keep = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
        self.truncate(keep)

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        if self._home is None:
            return
        self._home.truncate(length)
        self.policy.truncate(self._home.length)

    def reset(self) -> None:
        self._home = None
        self._chosen = None
        self.is_initialized = False
        self.policy.truncate(0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._home is not None:
            rows = self._home.rows
            self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._home is None:
            return
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(1)
        if indices.tolist() != list(range(self._home.rows)):
            self._home.take_rows(indices)
            self.policy.take_rows(indices)

    def offload(self) -> None:
        """Nothing to do: the home is where the KV lives anyway."""

    def prefetch(self) -> None:
        """Nothing to do: the rehearsal prefetches."""


class InfiniGenCache(Cache):
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
    """

    def __init__(
        self,
        layers: Sequence[OffloadedLayer | DynamicSlidingWindowLayer],
        sources: dict[int, list[int]],
        config: InfiniGenConfig,
        owner: object,
    ) -> None:
        super().__init__(layers=list(layers))
        self.config = config
        self.owner = owner
        self.recorder: Recorder | None = None
        self._sources = sources
        self._step: Step | None = None
        self._interrupted = False
        self._saw_prompt = False
        self._prompt_until = 0
        self._forced = False
        self._drafting: Literal["no", "armed", "yes"] = "no"

    @property
    def offloaded(self) -> list[OffloadedLayer]:
        """The layers whose KV has a home."""
        return [layer for layer in self.layers if isinstance(layer, OffloadedLayer)]

    @property
    def home_bytes(self) -> int:
        """Bytes reserved for KV in the homes of all layers."""
        return sum(layer.home_bytes for layer in self.offloaded)

    @property
    def policy_bytes(self) -> int:
        """Bytes of partial keys and the like on the device."""
        return sum(layer.policy.nbytes for layer in self.offloaded)

    def expect_prompt(self, tokens: int) -> None:
        """Say that the cache's first ``tokens`` tokens are prompt, however they arrive.

        A forward of one token on top of others is otherwise a decode step, and may select. Needed
        only by callers who feed a prompt in chunks of which the last may hold a single token.
        """
        self._prompt_until = tokens

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Inside the block every forward selects for each of its tokens, as single steps would."""
        before, self._forced = self._forced, True
        try:
            yield
        finally:
            self._forced = before

    def begin_forward(
        self, *, queries: int, rows: int, attention_mask: Tensor | None, position_ids: Tensor
    ) -> None:
        """The model starts a forward of ``queries`` new tokens in ``rows`` rows."""
        self._check_usable(rows)
        start = self.get_seq_length()
        self._step = Step(
            start=start,
            queries=queries,
            rows=rows,
            visible=_visible_tokens(attention_mask, rows, start + queries),
            position_ids=position_ids,
            selecting=self._decodes(start, queries),
            config=self.config,
            recorder=self.recorder,
        )
        for layer in self.offloaded:
            layer.begin(self._step)

    def attention_input(self, index: int, hidden: Tensor) -> OffloadedLayer | None:
        """Layer ``index`` is about to attend to ``hidden`` ``(B, Q, M)``: rehearse who reads that.

        Returns the layer itself where it is offloaded.
        """
        for follower in self._sources.get(index, ()):
            self.layers[follower].rehearse(hidden)
        layer = self.layers[index]
        return layer if isinstance(layer, OffloadedLayer) else None

    def end_forward(self) -> None:
        """The forward is over, also where it failed: then the tokens it added are taken back."""
        step, self._step = self._step, None
        if step is None:
            return
        done = all(layer.get_seq_length() == step.start + step.queries for layer in self.layers)
        for layer in self.offloaded:
            layer.begin(None)
            if not done:
                layer.truncate(step.start)
        if not done:
            # sliding layers have dropped what they would need to go back
            self._interrupted = len(self.offloaded) < len(self.layers)
            return
        self._saw_prompt |= step.queries > 1 or step.start + 1 == self._prompt_until
        if self._drafting == "armed":
            self._drafting = "yes"

    def reset(self) -> None:
        """Empty the cache; also makes an interrupted one usable again."""
        super().reset()
        self._interrupted = False
        self._saw_prompt = False
        self._prompt_until = 0
        self._drafting = "no"

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``-tokens_to_remove`` tokens; a positive number is the length to
        keep.
        """
        super().crop(tokens_to_remove)
        if self.get_seq_length() == 0:
            self._saw_prompt = False

    def activate_past_recording(self) -> None:
        """Assisted decoding starts: short forwards after the next one verify drafts, token by
        token.
        """
        super().activate_past_recording()
        self._drafting = "armed"

    def _decodes(self, start: int, queries: int) -> bool:
        """Whether a forward is a decode step, to which selection applies.

        A single token is one, unless it may belong to a prompt that is fed token by token.
        """
        if self._forced:
            return True
        if start < self._prompt_until or not self._saw_prompt or self._drafting == "armed":
            return False
        return queries == 1 or (self._drafting == "yes" and queries <= LONGEST_DRAFT)

    def _check_usable(self, rows: int) -> None:
        if self._step is not None:
            raise CacheStateError("this cache is in the middle of another forward")
        if self._interrupted:
            raise CacheStateError(
                "a forward with this cache was interrupted and its sliding layers cannot go back: "
                "call reset() and start again"
            )
        held = {layer.rows for layer in self.offloaded if layer.rows is not None}
        if held and held != {rows}:
            raise CacheStateError(
                f"the cache holds {held.pop()} rows but the forward has {rows}: use a cache of "
                "its own "
                "for each batch"
            )


def _attend_selected(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    selection: Selection,
    transfer: Transfer,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Attention of one query per row over what was moved, and over the token itself."""
    moved_keys, moved_values = transfer.wait()
    visible = None
    if selection.counts is not None:
        places = torch.arange(moved_keys.shape[2] + 1, device=query.device)
        last = places == moved_keys.shape[2]
        visible = (places < selection.counts.to(query.device)) | last  # (B, n + 1)
        visible = visible[:, None, None, :]
    return decode_attention(
        query,
        torch.cat([moved_keys, keys], dim=2),
        torch.cat([moved_values, values], dim=2),
        scaling=scaling,
        softcap=softcap,
        visible=visible,
    )


def _with_new_tokens(selected: Tensor, step: Step) -> Tensor:
    """A selection ``(B, H_kv, Q, S)`` and each query's own token."""
    own = torch.arange(step.start, step.start + step.queries, device=selected.device)
    return selected.scatter(-1, own[None, None, :, None].expand(*selected.shape[:3], 1), True)


def _visible_tokens(attention_mask: Tensor | None, rows: int, tokens: int) -> Tensor | None:
    """The caller's 2-D mask as booleans ``(rows, tokens)``; None where nothing is padding."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise InputError(
            f"attention_mask has {attention_mask.dim()} dimensions: an attached model takes a "
            "2-D mask "
            "(rows, tokens), 1 for tokens and 0 for padding, or none"
        )
    if attention_mask.shape != (rows, tokens):
        raise InputError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, but {rows} rows of {tokens} "
            "tokens are in the cache and this forward together"
        )
    visible = attention_mask.bool()
    return None if bool(visible.all()) else visible
