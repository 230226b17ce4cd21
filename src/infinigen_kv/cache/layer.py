"""One layer of the cache: its pool, its policy, and the attention that joins them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from infinigen_kv.attention.dense import decode_weights, dense_attention, grouped_scores
from infinigen_kv.cache.gradients import without_gradient
from infinigen_kv.cache.masks import mask_of_held, mask_of_no_tail, mask_of_selection
from infinigen_kv.cache.prompt_hint import hint_of_prompt
from infinigen_kv.errors import CacheStateError, HomeError
from infinigen_kv.kernels.base import Kernels
from infinigen_kv.policies.base import Policy
from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.select import Selection
from infinigen_kv.rehearsal.tail import attention_in_blocks
from infinigen_kv.storage.pools.pool import Pool

if TYPE_CHECKING:
    from infinigen_kv.models.adapters.layer_spec import LayerSpec

PoolMaker = Callable[[Tensor, Tensor], Pool]
"""Makes an empty pool for keys and values like these, ``(B, H_kv, *, D)``."""


class OffloadedLayer(CacheLayerMixin):
    """One layer whose KV lives in a pool and is attended to through a policy."""

    is_sliding = False
    supports_early_init = False

    def __init__(
        self, spec: LayerSpec, policy: Policy, make_pool: PoolMaker, kernels: Kernels
    ) -> None:
        super().__init__()
        self.spec = spec
        self.policy = policy
        self._kernels = kernels
        self.pool: Pool | None = None
        self._make_pool = make_pool
        self._device: torch.device | None = None
        self._step: Step | None = None
        self._chosen: Selection | None = None

    @property
    def rows(self) -> int | None:
        """Batch rows held, None while empty."""
        return None if self.pool is None else self.pool.rows

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # a class attribute in the base
        """Whether tokens can be taken back: not once others were evicted for them."""
        return self.pool is None or self.pool.positions is None

    # What the engine calls during a forward, in this order.

    def begin(self, step: Step | None) -> None:
        """Start a forward, or end it with None."""
        self._step = step
        self._chosen = None

    @property
    def selects(self) -> bool:
        """Whether the forward under way may select in this layer."""
        return self._step is not None and self.pool is not None and self._step.selecting

    def rehearse(self, hidden: Tensor) -> None:
        """Choose this layer's entries from the previous layer's input and start to move them."""
        step, pool = self._step, self.pool
        assert step is not None
        if pool is None or step.start == 0:
            return
        if step.selecting:
            self.rehearse_query(self.policy.predict(hidden, step))
        else:
            pool.prefetch_all()

    def rehearse_query(self, query: Tensor | None) -> None:
        """As `rehearse` in a step that selects, given the policy's prediction."""
        step, pool, policy = self._step, self.pool, self.policy
        assert step is not None and pool is not None
        selection = policy.plan(step, pool) if query is None else policy.rehearse(query, step, pool)
        if selection is not None:
            self._chosen = selection
            pool.prefetch(selection, step.selecting_rows)
        elif step.queries == 1 and not policy.selects_at_layer:
            pool.prefetch_all()

    def prefetch_next(self) -> None:
        """This layer has no predecessor: start to move what the next decode step will want."""
        step, pool = self._step, self.pool
        known = not self.policy.selects_at_layer  # otherwise it will choose at the layer itself
        if step is not None and pool is not None and step.queries == 1 and known:
            pool.prefetch_all()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns the new tokens alone; `attend` stores them and reads the others."""
        if self.pool is None:
            self.lazy_initialization(key_states, value_states)
        elif key_states.device != self._device:
            raise CacheStateError(
                f"layer {self.spec.index} moved from {self._device} to {key_states.device}, but "
                "its cache did not: start with a new cache once the model is where it is to stay"
            )
        return key_states, value_states

    @torch.inference_mode(False)  # what that makes may not be written to outside of it later
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.pool = self._make_pool(key_states, value_states)
        self._device = key_states.device
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
        """Store the new tokens and attend; shapes as in `attention.dense.dense_attention`.

        ``keys`` and ``values`` are those of the new tokens.

        Raises
        ------
        CacheStateError
            In a backward pass through the output, unless the cache was empty.
        """
        step = self._step
        assert step is not None
        learns = query.requires_grad or keys.requires_grad or values.requires_grad
        if step.start == 0 or not learns:
            return self._attend(query, keys, values, mask, scaling, softcap)
        new = query.detach(), keys.detach(), values.detach()
        output = self._attend(*new, mask, scaling, softcap)
        return without_gradient(output, query, keys, values)

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        step, pool = self._step, self.pool
        assert step is not None and pool is not None
        if pool.sinks and step.padding is not None:
            pool.set_padding(step.padding)
        if self.policy.selects_at_layer and step.selecting and step.queries == 1:
            self._chosen = self.policy.select_at_layer(query, step, pool)
            if self._chosen is not None:
                pool.prefetch(self._chosen, step.selecting_rows)
        if self._chosen is not None:
            return self._attend_selected(query, keys, values, scaling, softcap)
        return self._attend_all(query, keys, values, mask, scaling, softcap)

    def _attend_selected(
        self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, softcap: float | None
    ) -> Tensor:
        """One query per row, over what was moved and the token itself."""
        step, pool, selection = self._step, self.pool, self._chosen
        assert step is not None and pool is not None and selection is not None
        self._chosen = None
        if step.recorder is not None and step.recorder.needs_keys:
            step.recorder.see(self.spec, query, keys, step, pool, selection)
        output, weights = self._kernels.attend(
            query,
            pool.collect_in_place(),
            selection.counts,
            keys,
            values,
            scaling=scaling,
            softcap=softcap,
            weighed=self.policy.needs_weights,
            tail=self.policy.tail(selection),
        )
        slots = pool.append(keys, values)
        self.policy.observe(query, keys, values, step, pool, slots)
        if weights is not None:
            self.policy.attended(weights, selection, step)
        if step.recorder is not None:
            step.recorder.record(self.spec.index, step, selection, None)
        return output

    def _attend_all(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        """Exact attention, or a selection for each of several queries as a mask over everything."""
        step, pool = self._step, self.pool
        assert step is not None and pool is not None
        positions = pool.positions
        if step.recorder is not None and step.recorder.needs_keys:
            step.recorder.see(self.spec, query, keys, step, pool, None)
        all_keys, all_values, slots = self._extend(keys, values)
        self.policy.observe(query, keys, values, step, pool, slots)
        if step.may_end_prompt:
            self.policy.finish_prompt(all_keys, all_values, step, slots)
        picked = None
        if step.selecting and step.queries > 1:
            picked = self.policy.select(step, pool)
        if picked is not None:
            mask = mask_of_selection(picked, step)
        elif positions is not None:
            mask = mask_of_held(mask, positions, step)
        if step.recorder is not None:
            wanted = step.recorder.needs_scores and picked is not None
            scores = grouped_scores(query, all_keys, scaling, softcap) if wanted else None
            step.recorder.record(self.spec.index, step, picked, scores)
        tails = None if picked is None else self.policy.tails()
        if tails is not None:
            assert mask is not None
            output = attention_in_blocks(
                query, all_keys, all_values, mask, *tails, mask_of_no_tail(mask, step),
                scaling=scaling, softcap=softcap,
            )  # fmt: skip
        else:
            compute = self._kernels.attend_all if step.queries == 1 else dense_attention
            output = compute(
                query, all_keys, all_values, mask=mask, scaling=scaling, softcap=softcap
            )
        if step.queries == 1 and self.policy.needs_weights:
            weights = decode_weights(
                query, all_keys, scaling=scaling, softcap=softcap, visible=mask
            )
            self.policy.attended(weights, None, step)
        if step.may_end_prompt and pool.resident_budget:
            hint_of_prompt(self.policy, pool, step, query, all_keys, all_values, slots)
        return output

    def _extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store the new tokens; all keys and values, and the slots of the new ones."""
        assert self.pool is not None
        entries = self.pool.extend(keys.detach(), values.detach())
        if keys.requires_grad or values.requires_grad:  # there are no others, see `attend`
            return keys, values, entries[2]
        return entries

    # The interface of a Transformers cache layer.

    def get_seq_length(self) -> int:
        return 0 if self.pool is None else self.pool.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``-tokens_to_remove`` tokens; a positive one is the length to keep."""
        length = self.get_seq_length()
        keep = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
        if keep < length:
            self.truncate(keep)

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        if self.pool is None:
            return
        self.pool.truncate(length)
        self.policy.truncate(self.pool.length)

    def take_back(self, length: int) -> bool:
        """Forget what a failed forward added to ``length`` tokens; False where only `reset` can."""
        if self.pool is None:
            return True
        try:
            self.pool.discard()
            self.pool.forget_resident()
            if self.is_croppable or length == 0:
                self.truncate(length)
        except HomeError:
            return False
        return self.pool.length == length

    def abandon(self) -> None:
        """As `reset`, where the device may raise at every call."""
        pool, self.pool = self.pool, None
        self._chosen, self.is_initialized = None, False
        self.policy.truncate(0)
        if pool is not None:
            with suppress(RuntimeError, HomeError):
                pool.close()

    def reset(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.pool = None
        self._chosen = None
        self.is_initialized = False
        self.policy.truncate(0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.pool is not None:
            rows = self.pool.rows
            self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))

    @torch.inference_mode(False)
    def batch_select_indices(self, indices: Tensor) -> None:
        if self.pool is None:
            return
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(1)
        if indices.tolist() != list(range(self.pool.rows)):
            self.pool.take_rows(indices)
            self.policy.take_rows(indices)

    def offload(self) -> None:
        """Nothing to do: the home is where the KV lives anyway."""

    def prefetch(self) -> None:
        """Nothing to do: the rehearsal prefetches."""
