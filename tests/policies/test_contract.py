"""One contract for every policy, in the running engine."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import tiny
from calibrating import (
    calibrate_tiny,
    covering,
    feed,
    generate,
    left_padded,
    run,
    selecting,
    tokens,
)
from infinigen_kv import Calibration, InfiniGenCache, InfiniGenConfig, Session, attach
from infinigen_kv.cache.forward import decode, forward, prefill
from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.policies.registry import POLICIES, cache_plan
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv_lab.bench.fidelity import forgetting
from linking import FAST, failing, nothing_left, same
from selections import Sets, as_sets

PROMPT, LENGTH = 40, 52
PADDING = (0, 9)
BUDGET = 0.3
STORAGE = StorageConfig(link=FAST, resident=0, resident_layers=())
SELECTING = tuple(name for name in POLICIES if cache_plan(name, InfiniGenConfig(), STORAGE).selects)
BUDGETED = ("h2o", "scissorhands", "streaming-llm", "quest", "paging-h2o")
REMEMBERING = ("h2o", "scissorhands", "paging-h2o")  # what was attended to decides what is kept
PACKED = ("stream-int8", "stream-int4")  # keys are packed by groups, so their size matters
PAGED = ("paging", "paging-h2o")
every_policy = pytest.mark.parametrize("policy", POLICIES)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


def made(session: Session, policy: str, **options: Any) -> InfiniGenCache:
    return session.new_cache(policy=policy, tokens=LENGTH, **{"budget": BUDGET, **options})


def watched(cache: InfiniGenCache) -> FetchRecorder:
    cache.recorder = recorder = FetchRecorder(keep_indices=True)
    return recorder


def inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    return left_padded(tokens(2, LENGTH, seed), PADDING)


def steps(session: Session, cache: InfiniGenCache, ids: Tensor, mask: Tensor | None) -> Tensor:
    """Single tokens on top of what the cache holds, to the end of ``ids``."""
    places = range(cache.get_seq_length(), ids.shape[1])
    return torch.cat(
        [feed(session.model, cache, ids, mask, slice(at, at + 1)) for at in places], dim=1
    )


def expected_tokens(policy: str, config: InfiniGenConfig, cached: int) -> range:
    """How many tokens a step may attend to."""
    if cached < config.min_context:
        return range(cached, cached + 1)
    if policy in BUDGETED:
        budget = max(1, math.floor(BUDGET * cached))
        return range(budget, budget + 1)
    kept = min(cached, config.recent_tokens + config.sink_tokens)
    return range(max(math.floor(config.max_fetch * cached + 1e-4), kept) + 1)


def check_sets(policy: str, config: InfiniGenConfig, found: Sets) -> None:
    for (_, _, cached), heads in found.items():
        assert len({len(head) for head in heads}) == 1
        for head in heads:
            assert head <= set(range(cached)), "outside of the row, or padding"
            assert len(head) in expected_tokens(policy, config, cached)


def first_recorded(recorder: FetchRecorder) -> int:
    """Position of the first query that was recorded, if the last one ended the text."""
    if not recorder.selections:
        return LENGTH
    layer = recorder.selections[0][0]
    return LENGTH - sum(
        each.index.shape[2] for index, each in recorder.selections if index == layer
    )


# What is attended to.


@pytest.mark.parametrize("policy", SELECTING)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("min_context", [8, 35])
def test_budgets_are_kept_and_padding_is_not_touched(
    family: str, policy: str, min_context: int
) -> None:
    model = tiny.TINY[family]()
    config = selecting(min_context=min_context)
    ids, mask = inputs()
    with attach(model, calibrate_tiny(model), config, STORAGE) as session:
        cache = made(session, policy)
        recorder = watched(cache)
        logits = run(model, cache, ids, mask, prompt=PROMPT)
        layers = cache.speculated_layers
        cache.close()
    found = as_sets(recorder, PADDING, first=PROMPT)
    assert {layer for layer, _, _ in found} == set(layers)
    assert len(found) == len(layers) * 2 * (LENGTH - PROMPT)
    check_sets(policy, config, found)
    assert logits[mask.bool()].isfinite().all()


@pytest.mark.parametrize("policy", BUDGETED)
def test_short_contexts(llama: tuple[Any, Calibration], policy: str) -> None:
    """A prompt of one token, and budgets of less than one."""
    config = selecting(min_context=1, recent_tokens=1, sink_tokens=0)
    ids = tokens(1, 9)
    with attach(*llama, config, STORAGE) as session:
        cache = made(session, policy, budget=0.01)
        recorder = watched(cache)
        prefill(session, cache, ids[:, :1])
        logits = steps(session, cache, ids, None)
        cache.close()
    counts = [len(heads[0]) for heads in as_sets(recorder, (0,), first=1).values()]
    assert len(counts) == 8 * 4 and set(counts) == {1}
    assert logits.isfinite().all()


@every_policy
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_a_budget_that_covers_the_context_is_full_attention(family: str, policy: str) -> None:
    model = tiny.TINY[family]()
    ids, mask = inputs()
    rehearsal = "paper" if policy == "infinigen-paper" else "calibrated"  # not another's alpha
    with attach(model, calibrate_tiny(model), covering(rehearsal=rehearsal), STORAGE) as session:
        # of packed entries full attention is what `stream` does with that codec
        codec = policy.removeprefix("stream-") if policy in PACKED else "none"
        packed = StorageConfig(link=FAST, resident=0, resident_layers=(), codec=codec)
        name = "stream" if policy in PACKED else "ideal"
        expected = run(model, made(session, name, storage=packed), ids, mask, prompt=PROMPT)
        cache = made(session, policy, budget=1.0)
        actual = run(model, cache, ids, mask, prompt=PROMPT)
        cache.close()
    assert_close(actual[mask.bool()], expected[mask.bool()], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("policy", BUDGETED)
def test_a_smaller_budget_moves_less_and_errs_more(
    llama: tuple[Any, Calibration], policy: str
) -> None:
    ids = tokens(2, LENGTH)
    moved, errors = [], []
    with attach(*llama, selecting(), STORAGE) as session:
        exact = run(session.model, made(session, "ideal"), ids, prompt=PROMPT)
        for budget in (0.1, 0.5, 1.0):
            cache = made(session, policy, budget=budget)
            recorder = watched(cache)
            logits = run(session.model, cache, ids, prompt=PROMPT)
            moved.append(recorder.fetched_share(first_layer=1))
            errors.append((logits - exact).abs().mean().item())
            cache.close()
    assert moved == sorted(moved) and moved[0] < 0.11 and moved[2] == 1
    assert errors[0] > errors[2] and errors[1] > errors[2] and errors[2] < 1e-5


# Rows, chunks, many positions at once: where that must not show.


@every_policy
def test_a_row_of_a_batch_is_the_row_alone(llama: tuple[Any, Calibration], policy: str) -> None:
    ids, mask = inputs()
    with attach(*llama, selecting(), STORAGE) as session:
        together = made(session, policy)
        recorder = watched(together)
        batched = run(session.model, together, ids, mask, prompt=PROMPT)
        found = as_sets(recorder, PADDING, first=PROMPT)
        together.close()
        for row, pad in enumerate(PADDING):
            alone = made(session, policy)
            recorder = watched(alone)
            single = run(session.model, alone, ids[row : row + 1, pad:], prompt=PROMPT - pad)
            if policy not in PACKED:
                assert_close(batched[row : row + 1, pad:], single, atol=2e-4, rtol=2e-4)
            for (layer, _, cached), heads in as_sets(recorder, (0,), first=PROMPT - pad).items():
                assert found[layer, row, cached] == heads
            alone.close()


@every_policy
@pytest.mark.parametrize("chunk", [1, 7, 39])
def test_a_prompt_in_chunks_is_the_prompt_at_once(
    llama: tuple[Any, Calibration], policy: str, chunk: int
) -> None:
    ids = tokens(2, LENGTH)
    results, sets = [], []
    with attach(*llama, selecting(), STORAGE) as session:
        for size in (None, chunk):
            cache = made(session, policy)
            recorder = watched(cache)
            logits = [prefill(session, cache, ids[:, :PROMPT], chunk=size)]
            logits.append(steps(session, cache, ids, None))
            results.append(torch.cat(logits, dim=1))
            sets.append(as_sets(recorder, (0, 0), first=PROMPT))
            cache.close()
    if policy not in PACKED:  # later chunks attend to what was packed
        assert_close(results[1], results[0], atol=2e-4, rtol=2e-4)
        assert sets[1] == sets[0]


@pytest.mark.parametrize("policy", SELECTING)
@pytest.mark.parametrize("padding", [(0, 0), PADDING])
@pytest.mark.parametrize("min_context", [8, 44])
def test_many_positions_select_as_single_steps(
    llama: tuple[Any, Calibration], policy: str, padding: tuple[int, int], min_context: int
) -> None:
    ids, mask = left_padded(tokens(2, LENGTH), padding)
    config = selecting(min_context=min_context)
    with attach(*llama, config, STORAGE) as session:
        single, wide = made(session, policy), made(session, policy)
        recorders = [watched(cache) for cache in (single, wide)]
        expected = run(session.model, single, ids, mask, prompt=PROMPT)[:, PROMPT:]
        feed(session.model, wide, ids, mask, slice(0, PROMPT))
        with wide.decoding():
            pieces = [slice(PROMPT, PROMPT + 5), slice(PROMPT + 5, LENGTH)]
            actual = torch.cat([feed(session.model, wide, ids, mask, each) for each in pieces], 1)
        for cache in (single, wide):
            cache.close()
    assert_close(actual, expected, atol=2e-4, rtol=2e-4)
    by_step, at_once = (as_sets(each, padding, first_recorded(each)) for each in recorders)
    assert by_step.items() <= at_once.items()  # steps of short rows alone are not recorded
    assert len(by_step) >= 2 * 3 * (LENGTH - 44)


# Going back.


@every_policy
def test_a_step_that_is_taken_back_was_never_there(
    llama: tuple[Any, Calibration], policy: str
) -> None:
    """By `crop`, and because it failed."""
    ids, mask = inputs()
    model = llama[0]
    with attach(*llama, selecting(), STORAGE) as session:
        straight, cropped, failed = (made(session, policy) for _ in range(3))
        recorders = [watched(cache) for cache in (straight, cropped, failed)]
        for cache in (straight, cropped, failed):
            run(model, cache, ids[:, :45], mask[:, :45], prompt=PROMPT)
        other = ids.roll(3, dims=1)
        feed(model, cropped, other, mask, slice(45, 46))
        cropped.crop(-1)
        broken = failing(model.model.layers[2].mlp, RuntimeError("no"))
        with broken, pytest.raises(RuntimeError, match="no"):
            feed(model, failed, other, mask, slice(45, 46))
        for recorder in recorders:
            recorder.selections.clear()
        expected, *results = (
            steps(session, cache, ids, mask) for cache in (straight, cropped, failed)
        )
        for cache in (straight, cropped, failed):
            cache.close()
    if policy in PACKED:
        return
    for result in results:
        assert_close(result, expected, atol=1e-4, rtol=1e-4)
    chosen = [as_sets(recorder, PADDING, first=45) for recorder in recorders]
    assert chosen[1] == chosen[0] and chosen[2] == chosen[0]


@every_policy
@pytest.mark.parametrize("keep", [0, 1, 3])
def test_rejected_drafts_were_never_there(
    llama: tuple[Any, Calibration], policy: str, keep: int
) -> None:
    """Assisted decoding: several tokens are verified at once, and some of them are cropped."""
    ids = tokens(1, LENGTH)
    model = llama[0]
    with attach(*llama, selecting(), STORAGE) as session:
        straight, drafted = made(session, policy), made(session, policy)
        for cache in (straight, drafted):
            run(model, cache, ids[:, :42], prompt=PROMPT)
        drafts = torch.cat([ids[:, : 42 + keep], tokens(1, LENGTH, seed=9)], dim=1)
        with drafted.decoding():
            feed(model, drafted, drafts, None, slice(42, 46))
        drafted.crop(keep - 4)
        assert drafted.get_seq_length() == 42 + keep
        recorders = [watched(cache) for cache in (straight, drafted)]
        expected = steps(session, straight, ids, None)[:, keep:]
        actual = steps(session, drafted, ids, None)
        for cache in (straight, drafted):
            cache.close()
    if policy in PACKED:
        return
    assert_close(actual, expected, atol=2e-4, rtol=2e-4)
    ours, theirs = (as_sets(each, (0,), first_recorded(each)) for each in recorders)
    assert theirs.items() <= ours.items()


@every_policy
def test_crop_and_another_continuation(llama: tuple[Any, Calibration], policy: str) -> None:
    """Far back; what a policy remembers of removed tokens may differ, its budget may not."""
    config = selecting()
    ids, mask = inputs()
    other, _ = inputs(seed=1)
    other = torch.cat([ids[:, :30], other[:, 30:]], dim=1)
    model = llama[0]
    with attach(*llama, config, STORAGE) as session:
        cropped, fresh = made(session, policy), made(session, policy)
        run(model, cropped, ids, mask, prompt=PROMPT)
        cropped.crop(30)
        feed(model, cropped, other, mask, slice(30, PROMPT))
        recorder, reference = watched(cropped), watched(fresh)
        actual = steps(session, cropped, other, mask)
        feed(model, fresh, other, mask, slice(0, PROMPT))
        expected = steps(session, fresh, other, mask)
        for cache in (cropped, fresh):
            cache.close()
    found = as_sets(recorder, PADDING, first=PROMPT)
    check_sets(policy, config, found)
    assert actual.isfinite().all()
    if policy not in (*REMEMBERING, *PACKED):
        assert_close(actual, expected, atol=2e-4, rtol=2e-4)
        assert found == as_sets(reference, PADDING, first=PROMPT)


@every_policy
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_turn_that_is_taken_back_was_never_there(
    llama: tuple[Any, Calibration], policy: str, rounds: int
) -> None:
    """Cropped to where it began: against a cache that has read the prefix and the other turn."""
    prefix, (ids, mask) = 30, inputs()
    model = llama[0]
    with attach(*llama, selecting(), STORAGE) as session:
        cropped, fresh = made(session, policy), made(session, policy)
        for cache in (cropped, fresh):
            feed(model, cache, ids, mask, slice(0, prefix))
        for seed in range(rounds):
            other, _ = inputs(seed=seed + 1)
            feed(model, cropped, other, mask, slice(prefix, PROMPT))
            steps(session, cropped, other, mask)
            cropped.crop(prefix)
        for cache in (cropped, fresh):
            feed(model, cache, ids, mask, slice(prefix, PROMPT))
        recorders = [watched(cache) for cache in (cropped, fresh)]
        actual, expected = (steps(session, cache, ids, mask) for cache in (cropped, fresh))
        for cache in (cropped, fresh):
            cache.close()
    if policy in PACKED:  # a group that was cut stays as it was rounded
        return
    assert_close(actual, expected, atol=2e-4, rtol=2e-4)
    found, wanted = (as_sets(each, PADDING, first=PROMPT) for each in recorders)
    assert found == wanted


@every_policy
@pytest.mark.parametrize("emptied", ["reset", "crop"])
def test_an_emptied_cache_is_a_new_one(
    llama: tuple[Any, Calibration], policy: str, emptied: str
) -> None:
    ids, mask = inputs()
    other, _ = inputs(seed=1)
    with attach(*llama, selecting(), STORAGE) as session:
        used, new = made(session, policy), made(session, policy)
        run(session.model, used, other, mask, prompt=PROMPT)
        if emptied == "reset":
            used.reset()
        else:
            used.crop(-LENGTH)
        assert used.get_seq_length() == 0
        results = [run(session.model, cache, ids, mask, prompt=PROMPT) for cache in (used, new)]
        for cache in (used, new):
            cache.close()
    assert same(results[0], results[1])


# Batches that change, copies, later turns.


@every_policy
def test_rows_that_are_reordered_and_repeated(llama: tuple[Any, Calibration], policy: str) -> None:
    ids, mask = inputs()
    rows = torch.tensor([1, 1, 0])
    with attach(*llama, selecting(), STORAGE) as session:
        changed, plain = made(session, policy), made(session, policy)
        for cache in (changed, plain):
            run(session.model, cache, ids[:, :45], mask[:, :45], prompt=PROMPT)
        changed.batch_repeat_interleave(2)  # 0 0 1 1
        changed.reorder_cache(torch.tensor([3, 2, 1, 0]))  # 1 1 0 0
        changed.batch_select_indices(torch.tensor([True, True, False, True]))
        actual = steps(session, changed, ids[rows], mask[rows])
        expected = steps(session, plain, ids, mask)
        for cache in (changed, plain):
            cache.close()
    if policy not in PACKED:
        assert_close(actual, expected[rows], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in PAGED])
def test_a_copy_goes_its_own_way(llama: tuple[Any, Calibration], policy: str) -> None:
    ids, mask = inputs()
    other, _ = inputs(seed=1)
    with attach(*llama, selecting(), STORAGE) as session:
        cache, expected = made(session, policy), made(session, policy)
        for each in (cache, expected):
            run(session.model, each, ids[:, :45], mask[:, :45], prompt=PROMPT)
        copied = deepcopy(cache)
        steps(session, copied, other, mask)
        assert same(steps(session, cache, ids, mask), steps(session, expected, ids, mask))


@every_policy
def test_a_second_prompt(llama: tuple[Any, Calibration], policy: str) -> None:
    """Several tokens after decode steps are read in full, and then steps select again."""
    config = selecting()
    ids, mask = inputs()
    with attach(*llama, config, STORAGE) as session:
        cache = made(session, policy)
        run(session.model, cache, ids[:, :44], mask[:, :44], prompt=PROMPT)
        feed(session.model, cache, ids, mask, slice(44, 48))
        recorder = watched(cache)
        logits = steps(session, cache, ids, mask)
        cache.close()
    found = as_sets(recorder, PADDING, first=48)
    check_sets(policy, config, found)
    if policy in REMEMBERING:  # the new prompt is recent
        assert all(
            {cached - 1, cached - 2} <= head
            for (_, _, cached), heads in found.items()
            for head in heads
        )
    assert logits.isfinite().all()


@every_policy
def test_generate_by_beams(llama: tuple[Any, Calibration], policy: str) -> None:
    ids = tokens(1, PROMPT)
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3}
    with attach(*llama, covering(), STORAGE) as session:
        cache = made(session, policy, budget=1.0)
        beams = generate(session.model, ids, cache, new=8, **options)
        cache.close()
        if policy not in PACKED:
            exact = generate(session.model, ids, made(session, "ideal"), new=8, **options)
            assert beams.tolist() == exact.tolist()


# Homes and links.


@every_policy
def test_homes_and_links_do_not_show(
    llama: tuple[Any, Calibration], policy: str, tmp_path: Path
) -> None:
    ids, mask = inputs()
    results = []
    with attach(*llama, selecting()) as session, nothing_left(tmp_path):
        for storage in (
            StorageConfig(resident_layers=()),
            STORAGE,
            StorageConfig(home="disk", home_dir=tmp_path, resident_layers=()),
            StorageConfig(home="disk", home_dir=tmp_path, link=FAST, resident_layers=()),
        ):
            cache = made(session, policy, storage=storage)
            results.append(run(session.model, cache, ids, mask, prompt=PROMPT))
            cache.close()
    for result in results[1:]:
        assert_close(result[mask.bool()], results[0][mask.bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", BUDGETED)
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_budgets_over_packed_homes(llama: tuple[Any, Calibration], policy: str, codec: str) -> None:
    config = selecting()
    ids, mask = inputs()
    storage = StorageConfig(link=FAST, codec=codec, resident_layers=())
    with attach(*llama, config, storage) as session:
        cache = made(session, policy)
        recorder = watched(cache)
        logits = run(session.model, cache, ids, mask, prompt=PROMPT)
        cache.close()
    check_sets(policy, config, as_sets(recorder, PADDING, first=PROMPT))
    assert logits[mask.bool()].isfinite().all()


@pytest.mark.parametrize("policy", BUDGETED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(policy: str, dtype: torch.dtype) -> None:
    model = tiny.llama().to(dtype)
    config = selecting()
    ids, mask = inputs()
    with attach(model, calibrate_tiny(model), config, STORAGE) as session:
        cache = made(session, policy)
        recorder = watched(cache)
        logits = run(model, cache, ids, mask, prompt=PROMPT)
        cache.close()
    check_sets(policy, config, as_sets(recorder, PADDING, first=PROMPT))
    assert logits[mask.bool()].isfinite().all()


@pytest.mark.parametrize("policy", [name for name in BUDGETED if name not in PAGED])
def test_bytes_over_the_link_are_those_of_the_selection(
    llama: tuple[Any, Calibration], policy: str
) -> None:
    ids = tokens(2, PROMPT + 1)
    entry = 2 * 16 * 4  # bytes
    with attach(*llama, selecting(), STORAGE) as session:
        cache = made(session, policy)
        run(session.model, cache, ids, prompt=PROMPT)
        cache.reset_statistics()
        feed(session.model, cache, tokens(2, PROMPT + 2), None, slice(PROMPT + 1, PROMPT + 2))
        moved = cache.storage.link.statistics
        budget = math.floor(BUDGET * (PROMPT + 1))
        assert moved.bytes_down == 2 * 2 * 4 * budget * entry  # rows, heads, layers
        assert moved.bytes_up == 2 * 2 * 4 * entry
        assert cache.resident_hit_rate == 0 and not cache.resident_layers


# Anything, in any order.


@settings(max_examples=12)
@given(
    policy=st.sampled_from(SELECTING),
    deeds=st.lists(
        st.tuples(st.sampled_from(["prompt", "step", "wide", "crop", "rows"]), st.integers(1, 9)),
        max_size=12,
    ),
    budget=st.floats(0.02, 1.0),
)
def test_budgets_hold_whatever_happens(
    policy: str, deeds: list[tuple[str, int]], budget: float
) -> None:
    model, calibration = _llama()
    config = selecting(min_context=4)
    generator = torch.Generator().manual_seed(0)
    with attach(model, calibration, config, STORAGE) as session:
        cache = session.new_cache(policy=policy, budget=budget)
        prefill(session, cache, tokens(2, 20))
        for deed, number in deeds:
            length = cache.get_seq_length()
            new = torch.randint(3, 128, (2, number), generator=generator)
            recorder = watched(cache)
            if deed == "prompt":
                prefill(session, cache, new)
            elif deed == "step":
                with torch.no_grad():
                    forward(model, new[:, :1], cache)
            elif deed == "wide":
                with cache.decoding(), torch.no_grad():
                    forward(model, new, cache)
            elif deed == "crop" and length > number:
                cache.crop(-number)
            elif deed == "rows":
                cache.reorder_cache(torch.tensor([1, number % 2]))
            for (_, _, cached), heads in as_sets(recorder, (0, 0), first=length).items():
                for head in heads:
                    assert head <= set(range(cached))
                    if policy in BUDGETED and cached >= 4:
                        assert len(head) <= max(1, math.floor(budget * cached))
        cache.close()


@every_policy
@pytest.mark.parametrize("width", [1, 12])
def test_what_is_forgotten_leaves_no_trace(
    llama: tuple[Any, Calibration], policy: str, width: int
) -> None:
    ids, forgotten = tokens(1, LENGTH), tokens(1, 12, seed=1)
    found = []
    with attach(*llama, selecting(refit_every=4), STORAGE) as session, torch.no_grad():
        for forgets in (False, True):
            cache = made(session, policy)
            prefill(session, cache, ids[:, :PROMPT])
            steps(session, cache, ids[:, : PROMPT + 3], None)
            if forgets:
                with forgetting(cache):
                    for piece in forgotten.split(width, dim=1):
                        decode(session.model, piece, cache)
            found.append(steps(session, cache, ids, None))
            cache.close()
    assert torch.equal(*found)


_made: list[tuple[Any, Calibration]] = []


def _llama() -> tuple[Any, Calibration]:
    if not _made:
        model = tiny.llama()
        _made.append((model, calibrate_tiny(model)))
    return _made[0]
