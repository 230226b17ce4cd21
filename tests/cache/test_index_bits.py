"""Coded partial keys in the running engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tiny
from both_kernels import both_kernels  # noqa: F401
from calibrating import calibrate_tiny, covering, feed, left_padded, run, selecting, tokens
from infinigen_kv import Calibration, InfiniGenCache, InfiniGenConfig, attach
from infinigen_kv.cache.forward import cache_argument, decode, prefill
from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.errors import InputError
from infinigen_kv.policies.infinigen import InfiniGenPolicy
from infinigen_kv.rehearsal.coded_partial_keys import CodedPartialKeys
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv_lab.bench.fidelity import forgetting
from selections import as_sets

PROMPT, STEPS = 150, 90  # tokens are coded twice on the way
BITS = "4x2+3x3+2x7"  # of a head dimension of 16


def coded(**changes: Any) -> InfiniGenConfig:
    return selecting(**{"index_bits": BITS, "partial_ratio": None, "refit_every": 40, **changes})


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


def indexes(cache: InfiniGenCache) -> Iterator[CodedPartialKeys]:
    for layer in cache.offloaded:
        if isinstance(layer.policy, InfiniGenPolicy) and layer.policy._partial_keys is not None:
            assert isinstance(layer.policy._partial_keys, CodedPartialKeys)
            yield layer.policy._partial_keys


def stepped(model: Any, cache: InfiniGenCache, ids: Tensor, first: int, last: int) -> Tensor:
    each = [feed(model, cache, ids, None, slice(at, at + 1)) for at in range(first, last)]
    return torch.cat(each, dim=1)


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2", "gpt_neox"])
def test_of_all_tokens_the_output_is_that_of_full_attention(family: str) -> None:
    model = tiny.TINY[family]()
    ids = tokens(2, PROMPT + STEPS)
    config = covering(index_bits="2x2", partial_ratio=None, tail=False)
    with attach(model, calibrate_tiny(model), config) as session:
        found = run(model, session.new_cache(), ids, torch.ones_like(ids), prompt=PROMPT)
        expected = run(
            model, session.new_cache(policy="ideal"), ids, torch.ones_like(ids), prompt=PROMPT
        )
    assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("refit_every", "tail", "min_context"),
    [(0, True, 8), (40, True, 8), (40, False, 8), (0, True, 170), (40, True, 170)],
)  # the last two are reached while decoding
def test_many_positions_select_as_single_steps(
    llama: tuple[Any, Calibration], refit_every: int, tail: bool, min_context: int
) -> None:
    model, _ = llama
    ids = tokens(2, PROMPT + STEPS)
    config = coded(refit_every=refit_every, tail=tail, min_context=min_context)
    with attach(*llama, config) as session:
        caches = [session.new_cache() for _ in range(2)]
        recorders = [FetchRecorder(keep_indices=True) for _ in caches]
        for cache, recorder in zip(caches, recorders, strict=True):
            prefill(session, cache, ids[:, :PROMPT])
            cache.recorder = recorder
        expected = stepped(model, caches[0], ids, PROMPT, PROMPT + STEPS)
        found = decode(model, ids[:, PROMPT:], caches[1])
        codes = [list(indexes(cache)) for cache in caches]
    assert_close(found, expected, atol=1e-3, rtol=1e-3)
    first = max(PROMPT, min_context)
    one, many = (as_sets(recorder, (0, 0), first) for recorder in recorders)
    same = sum(one[place] == many[place] for place in one)
    assert one.keys() == many.keys() and same > 0.98 * len(one)  # a code may round otherwise
    for mine, theirs in zip(*codes, strict=True):
        assert mine.coded == theirs.coded == 192 and mine.length == theirs.length


@pytest.mark.parametrize("keep", [PROMPT - 100, PROMPT - 10, PROMPT, PROMPT + 5, PROMPT + 60])
def test_what_follows_a_cut_goes_on_from_there(llama: tuple[Any, Calibration], keep: int) -> None:
    model, _ = llama
    ids, others = tokens(1, PROMPT + STEPS), tokens(1, 2 * STEPS, seed=5)
    with attach(*llama, coded()) as session:
        cache, fresh = session.new_cache(), session.new_cache()
        prefill(session, cache, ids[:, :PROMPT])
        stepped(model, cache, ids, PROMPT, PROMPT + STEPS)
        cache.crop(keep)
        found = stepped(model, cache, others, 0, STEPS)
        prefill(session, fresh, ids[:, :PROMPT])
        if keep > PROMPT:
            stepped(model, fresh, ids, PROMPT, keep)
        fresh.crop(keep)
        expected = stepped(model, fresh, others, 0, STEPS)
    # what the sums know of tokens that are gone may differ, see `rehearsal.running`
    assert (found - expected).abs().mean() < 0.2 * expected.std()
    assert all(each.length == keep + STEPS for each in indexes(cache))


def test_drafts_leave_nothing(llama: tuple[Any, Calibration]) -> None:
    model, _ = llama
    ids = tokens(1, PROMPT + STEPS)
    with attach(*llama, coded()) as session:
        plain, drafted = session.new_cache(), session.new_cache()
        for cache in (plain, drafted):
            prefill(session, cache, ids[:, :PROMPT])
        expected = stepped(model, plain, ids, PROMPT, PROMPT + STEPS)
        found = []
        for at in range(PROMPT, PROMPT + STEPS):
            with forgetting(drafted), drafted.decoding():
                feed(model, drafted, tokens(1, 9, seed=at), None, slice(0, 9))
            found.append(feed(model, drafted, ids, None, slice(at, at + 1)))
    assert_close(torch.cat(found, dim=1), expected, atol=1e-5, rtol=1e-5)


def test_beams_take_their_codes_along(llama: tuple[Any, Calibration]) -> None:
    model, _ = llama
    ids, order = tokens(3, PROMPT + STEPS), torch.tensor([2, 0, 2])
    with attach(*llama, coded()) as session:
        cache, fresh = session.new_cache(), session.new_cache()
        prefill(session, cache, ids[:, :PROMPT])
        cache.reorder_cache(order)
        prefill(session, fresh, ids[order, :PROMPT])
        found, expected = (
            stepped(model, each, ids, PROMPT, PROMPT + STEPS) for each in (cache, fresh)
        )
        assert_close(found, expected, atol=1e-4, rtol=1e-4)
        options: dict[str, Any] = {"max_new_tokens": 70, "num_beams": 3, "do_sample": False}
        once, again = (
            model.generate(
                ids[:1, :PROMPT], **{cache_argument(model): session.new_cache()}, **options
            )
            for _ in range(2)
        )
    assert torch.equal(once, again) and once.shape[1] <= PROMPT + 70


def test_rows_of_a_batch_are_the_rows_alone(llama: tuple[Any, Calibration]) -> None:
    prompts = [tokens(1, length, seed=length) for length in (100, 150, 37)]
    fed = tokens(3, STEPS, seed=3)
    with attach(*llama, coded()) as session:
        with session.new_batch(tokens=PROMPT + STEPS, rows=3) as batch:
            rows = [batch.join(prompt) for prompt in prompts]
            found = torch.stack([batch.step(rows, fed[:, at])[:, 0] for at in range(STEPS)], 1)
        for place, prompt in enumerate(prompts):
            with session.new_batch(tokens=PROMPT + STEPS, rows=3) as alone:
                row = alone.join(prompt)
                one = [alone.step([row], fed[place, at : at + 1]) for at in range(STEPS)]
            assert_close(found[place], torch.stack([each[0, 0] for each in one]))


def test_padded_rows_are_refused(llama: tuple[Any, Calibration]) -> None:
    model, _ = llama
    ids, mask = left_padded(tokens(2, PROMPT), (0, 13))
    with attach(*llama, coded()) as session:
        message = f"index_bits='{BITS}' is not valid for padded rows".replace("+", r"\+")
        with pytest.raises(InputError, match=message):
            feed(model, session.new_cache(), ids, mask, slice(0, PROMPT))


@pytest.mark.parametrize("capacity", [100, 0.8])
def test_a_limited_home_is_refused(llama: tuple[Any, Calibration], capacity: float) -> None:
    message = f"index_bits='{BITS}' is not valid with capacity={capacity}".replace("+", r"\+")
    storage = StorageConfig(capacity=capacity)
    with attach(*llama, coded(), storage) as session, pytest.raises(InputError, match=message):
        session.new_cache(tokens=200)


def test_more_dimensions_than_a_head_has_are_refused(llama: tuple[Any, Calibration]) -> None:
    message = "index_bits='4x17' is not valid for this model: it has 17 dimensions, and the model's"
    config = coded(index_bits="4x17")
    with attach(*llama, config) as session, pytest.raises(InputError, match=message):
        session.new_cache()
