"""Selection in the running engine: equal to plain loops, alone and many positions at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

import tiny
from both_kernels import both_kernels  # noqa: F401
from calibrating import calibrate_tiny, feed, left_padded, run, selecting, tokens
from infinigen_kv import InfiniGenCache, InfiniGenConfig, attach
from infinigen_kv.cache.forward import prefill
from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.kernels.finding import KernelsName, find_kernels
from infinigen_kv.policies.infinigen import InfiniGenPolicy
from infinigen_kv.policies.rehearsal_layer import RehearsalLayer
from infinigen_kv.policies.step import Step
from infinigen_kv.storage.pools.local import LocalPool
from naive import NaiveSelection
from selections import Sets, as_sets, heads_of

PROMPT, STEPS = 40, 5
PADDING = (0, 13)
# one setting where the cap binds, and one where it does not
SETTINGS = {"capped": {}, "free": {"alpha": 1.5, "max_fetch": 0.9, "recent_tokens": 3}}


def recording(cache: InfiniGenCache) -> FetchRecorder:
    recorder = FetchRecorder(keep_indices=True)
    cache.recorder = recorder
    return recorder


# The engine is the naive loop.


@pytest.mark.parametrize("family", ["llama", "opt", "qwen2", "qwen3", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("rehearsal", ["calibrated", "paper"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_selection_equals_naive_loops(family: str, rehearsal: str, setting: str) -> None:
    model = tiny.TINY[family]()
    calibration = calibrate_tiny(model)
    config = selecting(rehearsal=rehearsal, **SETTINGS[setting])
    ids, mask = left_padded(tokens(2, PROMPT + STEPS), PADDING)
    naive = NaiveSelection(model, calibration, config)
    naive.padding = PADDING
    with naive.running():
        expected = run(model, DynamicCache(config=model.config), ids, mask, prompt=PROMPT)
    with attach(model, calibration, config) as session:
        cache = session.new_cache()
        recorder = recording(cache)
        actual = run(model, cache, ids, mask, prompt=PROMPT)
    assert_close(actual[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)
    selected = as_sets(recorder, PADDING, first=PROMPT)
    assert len(naive.chosen) == len(selected)
    per_step = len(naive.chosen) // STEPS
    for number, (layer, row, heads) in enumerate(naive.chosen):
        at = PROMPT + number // per_step - PADDING[row]
        assert selected[layer, row, at] == heads


def test_settings_of_these_tests_reach_the_cap_and_do_not() -> None:
    model = tiny.llama()
    shares = {}
    for name, changes in SETTINGS.items():
        with attach(model, calibrate_tiny(model), selecting(**changes)) as session:
            cache = session.new_cache()
            recorder = recording(cache)
            run(model, cache, tokens(1, PROMPT + STEPS), prompt=PROMPT)
        counts = {len(heads[0]) for heads in as_sets(recorder, (0,), first=PROMPT).values()}
        shares[name] = counts
    assert max(shares["capped"]) in (12, 13)
    assert max(shares["free"]) < 0.9 * PROMPT
    assert len(shares["free"]) > 3


# Full rank and the right query: the right order.


@pytest.mark.parametrize("rehearsal", ["calibrated", "paper"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_full_rank_with_an_exact_prediction_ranks_as_the_true_scores(
    rehearsal: str,
    softcap: float | None,
    both_kernels: KernelsName,  # noqa: F811
) -> None:
    rows, heads, kv_heads, dim, count = 2, 6, 2, 16, 30
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    # an offset common to all keys, as models with key biases have
    keys, values = random(rows, kv_heads, count, dim) + 3 * random(1, kv_heads, 1, dim), random(1)
    values = random(rows, kv_heads, count, dim)
    truth = random(rows, heads, 1, dim)
    skew = torch.linalg.qr(random(kv_heads, dim, dim)).Q if rehearsal == "paper" else None
    config = selecting(
        rehearsal=rehearsal,
        partial_ratio=1.0,
        max_fetch=1.0,
        recent_tokens=0,
        sink_tokens=0,
    )
    layer = RehearsalLayer(
        lambda hidden, step: truth, skew, scaling=0.3, softcap=softcap, alpha=1.5
    )
    kernels = find_kernels(both_kernels, keys.device, keys.dtype)
    policy, pool = InfiniGenPolicy(layer, config, kernels), LocalPool(keys, values)

    prompt = _step(config, start=0, queries=count, selecting=False)
    pool.append(keys, values)
    policy.observe(random(rows, heads, count, dim), keys, values, prompt, pool, None)
    step = _step(config, start=count, queries=1, selecting=True)
    query = policy.predict(random(rows, 1, 8), step)
    assert query is not None
    selection = policy.rehearse(query, step, pool)
    assert selection is not None
    for row in range(rows):
        found = []
        for head in range(kv_heads):
            scores = (0.3 * truth[row, 3 * head : 3 * head + 3, 0]) @ keys[row, head].T
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            found.append((scores - scores.amax(-1, keepdim=True)).amax(0))
        wanted = round(sum(int((margin > -1.5).sum()) for margin in found) / kv_heads)
        for head, margin in enumerate(found):
            expected = set(margin.topk(wanted).indices.tolist())
            assert heads_of(selection, row, 0, 0)[head] == expected


def _step(config: InfiniGenConfig, *, start: int, queries: int, selecting: bool) -> Step:
    return Step(
        start=start,
        queries=queries,
        rows=2,
        visible=None,
        position_ids=torch.arange(start, start + queries)[None],
        selecting=selecting,
        config=config,
    )


# Many positions at once.


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("rehearsal", ["calibrated", "paper"])
@pytest.mark.parametrize("padding", [(0, 0), (0, 13)])
@pytest.mark.parametrize("min_context", [8, 30, 44])  # before, for some rows after, and after all
def test_many_positions_select_as_single_steps(
    family: str, rehearsal: str, padding: tuple[int, int], min_context: int
) -> None:
    model = tiny.TINY[family]()
    config = selecting(rehearsal=rehearsal, min_context=min_context)
    width = 9
    ids, mask = left_padded(tokens(2, PROMPT + width), padding)
    with attach(model, calibrate_tiny(model), config) as session:
        single, wide, split = (session.new_cache() for _ in range(3))
        recorders = [recording(cache) for cache in (single, wide, split)]
        expected = run(model, single, ids, mask, prompt=PROMPT)[:, PROMPT:]
        for cache in (wide, split):
            feed(model, cache, ids, mask, slice(0, PROMPT))
        with wide.decoding():
            together = feed(model, wide, ids, mask, slice(PROMPT, PROMPT + width))
        with split.decoding():
            pieces = [slice(40, 44), slice(44, 45), slice(45, 49)]
            apart = torch.cat([feed(model, split, ids, mask, piece) for piece in pieces], 1)
    assert_close(together, expected, atol=1e-4, rtol=1e-4)
    assert_close(apart, expected, atol=1e-4, rtol=1e-4)
    by_step, at_once, in_pieces = (
        _with_exact(as_sets(recorder, padding, first), padding, width)
        for recorder, first in zip(recorders, _firsts(recorders, width), strict=True)
    )
    assert at_once == by_step
    assert in_pieces == by_step


def _firsts(recorders: list[FetchRecorder], width: int) -> list[int]:
    """Position of the first recorded query: exact forwards are not recorded."""
    firsts = []
    for recorder in recorders:
        layer = recorder.selections[0][0]
        seen = sum(each.index.shape[2] for index, each in recorder.selections if index == layer)
        firsts.append(PROMPT + width - seen)
    return firsts


def _with_exact(found: Sets, padding: tuple[int, ...], width: int) -> Sets:
    """The same, with the positions that attended to everything filled in."""
    layers = {layer for layer, _, _ in found}
    heads = len(next(iter(found.values())))
    for layer in layers:
        for row, shift in enumerate(padding):
            for at in range(PROMPT - shift, PROMPT - shift + width):
                found.setdefault((layer, row, at), [set(range(at))] * heads)
    return found


def test_many_positions_from_an_empty_cache() -> None:
    """There is no prompt to learn from, so the first forward is exact."""
    model = tiny.llama()
    ids = tokens(2, PROMPT)
    with attach(model, calibrate_tiny(model), selecting()) as session:
        exact, forced = session.new_cache(policy="ideal"), session.new_cache()
        with forced.decoding():
            actual = feed(model, forced, ids, None, slice(0, PROMPT))
            assert_close(actual, feed(model, exact, ids, None, slice(0, PROMPT)))
            recorder = recording(forced)
            feed(model, forced, ids, None, slice(0, 3))
    assert recorder.fetched_share(first_layer=1) < 0.4


def test_selection_resumes_after_another_prompt() -> None:
    """Partial keys miss the tokens that were attended to in full; they are written then."""
    model = tiny.llama()
    calibration = calibrate_tiny(model)
    ids = tokens(1, 60)
    with attach(model, calibration, selecting(partial_ratio=1.0)) as session:
        cache = session.new_cache()
        run(model, cache, ids[:, :45], prompt=PROMPT)
        feed(model, cache, ids, None, slice(45, 55))
        recorder = recording(cache)
        feed(model, cache, ids, None, slice(55, 56))
        for layer in cache.offloaded[1:]:
            policy: Any = layer.policy
            buffer = policy._partial_keys
            assert buffer is not None and buffer.length == 56
    assert {len(head) for heads in as_sets(recorder, (0,), 55).values() for head in heads} == {16}


# Budgets.


@settings(max_examples=15)
@given(
    alpha=st.floats(0, 20),
    max_fetch=st.floats(0.01, 1),
    recent=st.integers(0, 30),
    sinks=st.integers(0, 30),
    min_context=st.integers(1, 30),
    wide=st.booleans(),
)
def test_budgets_and_bounds(
    alpha: float, max_fetch: float, recent: int, sinks: int, min_context: int, wide: bool
) -> None:
    model, calibration = _llama()
    config = selecting(
        alpha=alpha,
        max_fetch=max_fetch,
        recent_tokens=recent,
        sink_tokens=sinks,
        min_context=min_context,
    )
    ids, mask = left_padded(tokens(2, 24), (0, 9))
    with attach(model, calibration, config) as session:
        cache = session.new_cache()
        recorder = recording(cache)
        if wide:
            feed(model, cache, ids, mask, slice(0, 20))
            with cache.decoding():
                logits = feed(model, cache, ids, mask, slice(20, 24))
        else:
            logits = run(model, cache, ids, mask, prompt=20)[:, 20:]
    assert logits.isfinite().all()
    if recorder.selections:
        seen = sum(each.index.shape[2] for layer, each in recorder.selections if layer == 1)
        for (_, _, at), heads in as_sets(recorder, (0, 9), first=24 - seen).items():
            _check_budget(config, at, heads)


def _check_budget(config: InfiniGenConfig, cached: int, heads: list[set[int]]) -> None:
    everything = set(range(cached))
    assert len({len(head) for head in heads}) == 1
    for head in heads:
        assert head <= everything
        if cached < config.min_context:
            assert head == everything
            continue
        sinks = set(range(min(config.sink_tokens, cached)))
        recent = set(range(max(0, cached - config.recent_tokens), cached))
        assert sinks | recent <= head
        least = min(cached, config.recent_tokens + config.sink_tokens)
        # the product is taken in float32
        assert len(head) <= max(math.floor(config.max_fetch * cached + 1e-4), least)


_made: list[Any] = []


def _llama() -> tuple[Any, Any]:
    if not _made:
        model = tiny.llama()
        _made.extend((model, calibrate_tiny(model)))
    return _made[0], _made[1]


def test_fetched_share_counts_what_was_selected() -> None:
    model, calibration = _llama()
    with attach(model, calibration, selecting()) as session:
        cache = session.new_cache()
        recorder = recording(cache)
        prefill(session, cache, tokens(1, PROMPT))
        for at in range(3):
            feed(model, cache, tokens(1, 3, seed=2), None, slice(at, at + 1))
    sets = as_sets(recorder, (0,), first=PROMPT)
    for layer in (1, 2, 3):
        shares = [len(heads[0]) / at for (where, _, at), heads in sets.items() if where == layer]
        assert recorder.fetched_by_layer[layer] == pytest.approx(sum(shares) / 3)
    assert recorder.fetched_by_layer[0] == 1.0
