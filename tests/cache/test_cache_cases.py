"""What users of neighbouring systems reported about cache objects: crop, beams, batches, dtypes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

import tiny
from both_kernels import both_kernels  # noqa: F401
from calibrating import (
    calibrate_tiny,
    covering,
    feed,
    generate,
    left_padded,
    positions_of,
    reference,
    run,
    selecting,
    tokens,
)
from infinigen_kv import CacheStateError, Calibration, InfiniGenConfig, Session, attach
from infinigen_kv.cache.recorder import FetchRecorder

FAMILIES = ("llama", "opt", "gemma2")
EXACT: dict[str, dict[str, Any]] = {
    "full": {"policy": "ideal"},
    "covering": {},
}  # both must equal full attention
LENGTH, PROMPT = 52, 40


@pytest.fixture(scope="module", params=FAMILIES)
def fitted(request: pytest.FixtureRequest) -> tuple[Any, Calibration]:
    model = tiny.TINY[request.param]()
    return model, calibrate_tiny(model)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


@pytest.fixture(params=["calibrated", "paper"])
def config(request: pytest.FixtureRequest) -> InfiniGenConfig:
    return selecting(rehearsal=request.param)


@pytest.fixture
def covered(fitted: tuple[Any, Calibration]) -> Iterator[Session]:
    with attach(*fitted, covering()) as session:
        yield session


def recorded(cache: Any) -> FetchRecorder:
    cache.recorder = FetchRecorder(keep_indices=True)
    return cache.recorder


def chosen(recorder: FetchRecorder, row: int = 0, shift: int = 0) -> list[tuple[int, list[Any]]]:
    """Per layer and step the set of tokens of each KV head of one row, ``shift`` taken off."""
    found = []
    for layer, selection in recorder.selections:
        index = selection.index[row, :, 0]
        count = index.shape[-1] if selection.counts is None else int(selection.counts[row, 0])
        found.append((layer, [sorted((head[:count] - shift).tolist()) for head in index]))
    return found


# Case A: crop.


@pytest.mark.parametrize("policy", EXACT)
@pytest.mark.parametrize("removed", [3, 4, 1000])
def test_crop_to_nothing_and_beyond(
    fitted: tuple[Any, Calibration], policy: str, removed: int
) -> None:
    model, _ = fitted
    ids = tokens(2, 12)
    expected = reference(model, ids, prompt=6)
    with attach(*fitted, covering()) as session:
        cache = session.new_cache(**EXACT[policy])
        feed(model, cache, tokens(2, 3, seed=1), None, slice(0, 3))
        cache.crop(-removed)
        assert cache.get_seq_length() == 0
        assert {layer.get_seq_length() for layer in cache.layers} == {0}
        assert_close(run(model, cache, ids, prompt=6), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", EXACT)
def test_crop_then_another_continuation(covered: Session, policy: str) -> None:
    model = covered.model
    ids, other = tokens(2, LENGTH), tokens(2, LENGTH, seed=1)
    kept = 14  # below every window, so that sliding layers can go back
    expected = reference(model, torch.cat([ids[:, :kept], other], 1), prompt=kept)[:, kept:]
    cache = covered.new_cache(**EXACT[policy])
    run(model, cache, ids[:, :15], prompt=9)
    cache.crop(kept - 15)
    whole = torch.cat([ids[:, :kept], other], 1)
    actual = [feed(model, cache, whole, None, slice(kept, kept + 5))]
    actual += [
        feed(model, cache, whole, None, slice(at, at + 1)) for at in range(kept + 5, whole.shape[1])
    ]
    assert_close(torch.cat(actual, 1), expected, atol=1e-4, rtol=1e-4)


def test_crop_with_a_positive_number_keeps_that_many(llama: tuple[Any, Calibration]) -> None:
    with attach(*llama, selecting()) as session:
        cache = session.new_cache()
        run(llama[0], cache, tokens(1, 20), prompt=12)
        for asked, left in ((25, 20), (15, 15), (0, 15), (-1, 14)):
            cache.crop(asked)
            assert cache.get_seq_length() == left


def test_selection_after_crop_equals_the_run_that_never_went_on(
    llama: tuple[Any, Calibration], config: InfiniGenConfig
) -> None:
    model, _ = llama
    ids, other = tokens(1, LENGTH), tokens(1, 6, seed=9)
    with attach(*llama, config) as session:
        straight, cropped = session.new_cache(), session.new_cache()
        recorders = recorded(straight), recorded(cropped)
        run(model, straight, ids[:, :46], prompt=PROMPT)
        run(model, cropped, ids[:, :46], prompt=PROMPT)
        for at in range(6):
            feed(model, cropped, other, None, slice(at, at + 1))
        cropped.crop(-6)
        for recorder in recorders:
            recorder.selections.clear()
        results = [
            torch.cat([feed(model, each, ids, None, slice(at, at + 1)) for at in range(46, LENGTH)])
            for each in (straight, cropped)
        ]
    assert chosen(recorders[0]) == chosen(recorders[1])
    assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [tiny.gemma2, "qwen2_sliding"])  # a sliding layer first, or last
@pytest.mark.parametrize("asked", [10, -8, -18, -100])
def test_crop_within_the_window(make: Any, asked: int) -> None:
    """All layers end at the same length, whichever sign says so."""
    if make == "qwen2_sliding":
        make = partial(tiny.qwen2, use_sliding_window=True, sliding_window=20, max_window_layers=2)
    model = make()
    ids = tokens(1, 30)
    with attach(model) as session:
        cache = session.new_cache(policy="ideal")
        feed(model, cache, ids, None, slice(0, 18))
        cache.crop(asked)
        left = asked if asked > 0 else max(0, 18 + asked)
        assert {layer.get_seq_length() for layer in cache.layers} == {left}
        actual = feed(model, cache, ids, None, slice(left, 30))
    assert_close(actual, reference(model, ids, prompt=30)[:, left:], atol=1e-4, rtol=1e-4)


def test_crop_that_the_window_cannot_undo_changes_nothing() -> None:
    model = tiny.qwen2(use_sliding_window=True, sliding_window=20, max_window_layers=2)
    ids = tokens(1, 31)
    with attach(model) as session:
        cache = session.new_cache(policy="ideal")
        feed(model, cache, ids, None, slice(0, 30))
        with pytest.raises(RuntimeError, match="past"):
            cache.crop(-4)
        assert {layer.get_seq_length() for layer in cache.layers} == {30}
        actual = feed(model, cache, ids, None, slice(30, 31))
    assert_close(actual, reference(model, ids, prompt=30)[:, 30:], atol=1e-4, rtol=1e-4)


def test_an_emptied_cache_takes_another_batch(llama: tuple[Any, Calibration]) -> None:
    model, _ = llama
    with attach(*llama, covering()) as session:
        cache = session.new_cache()
        run(model, cache, tokens(3, 12), prompt=8)
        cache.reset()
        ids = tokens(2, 12)
        assert_close(
            run(model, cache, ids, prompt=8), reference(model, ids, prompt=8), atol=1e-4, rtol=1e-4
        )


# Case B: beams.


@pytest.mark.parametrize("policy", EXACT)
@pytest.mark.parametrize("padding", [(0, 0), (0, 5)])
def test_beam_search(covered: Session, policy: str, padding: tuple[int, int]) -> None:
    model = covered.model
    ids, mask = left_padded(tokens(2, PROMPT), padding)
    options: dict[str, Any] = {
        "num_beams": 4,
        "num_return_sequences": 3,
        "return_dict_in_generate": True,
        "output_scores": True,
        "attention_mask": mask,
        "new": 10,
    }
    expected = generate(model, ids, **options)
    actual = generate(model, ids, covered.new_cache(**EXACT[policy]), **options)
    assert actual.sequences.tolist() == expected.sequences.tolist()
    assert_close(actual.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-4)


def test_reordered_rows_go_on_as_their_own_runs(
    llama: tuple[Any, Calibration], config: InfiniGenConfig
) -> None:
    """Selection included: row i of the reordered batch is the run of the row it came from."""
    model, _ = llama
    ids, mask = left_padded(tokens(3, LENGTH), (0, 7, 3))
    order = torch.tensor([2, 0, 0, 1])
    with attach(*llama, config) as session:
        expected, traces = [], []
        for row, padding in ((0, 0), (1, 7), (2, 3)):
            cache = session.new_cache()
            trace = recorded(cache)
            logits = run(model, cache, ids[row : row + 1, padding:], prompt=PROMPT - padding)
            expected.append(logits[0, -8:])
            traces.append(chosen(trace)[-8 * 3 :])
        cache = session.new_cache()
        trace = recorded(cache)
        run(model, cache, ids[:, : LENGTH - 8], mask[:, : LENGTH - 8], prompt=PROMPT)
        cache.reorder_cache(order)
        trace.selections.clear()
        ids, mask = ids[order], mask[order]
        steps = range(LENGTH - 8, LENGTH)
        actual = torch.cat([feed(model, cache, ids, mask, slice(at, at + 1)) for at in steps], 1)
    for row, origin in enumerate(order.tolist()):
        assert chosen(trace, row, shift=(0, 7, 3)[origin]) == traces[origin]
        assert_close(actual[row], expected[origin], atol=1e-4, rtol=1e-4)


def test_rows_can_be_repeated_and_selected(llama: tuple[Any, Calibration]) -> None:
    model, _ = llama
    ids = tokens(2, LENGTH)
    with attach(*llama, selecting()) as session:
        plain, changed = session.new_cache(), session.new_cache()
        for cache in (plain, changed):
            run(model, cache, ids[:, :46], prompt=PROMPT)
        changed.batch_repeat_interleave(3)
        changed.batch_select_indices(torch.tensor([False, True, False, True, False, False]))
        expected = feed(model, plain, ids, None, slice(46, 47))
        assert_close(feed(model, changed, ids, None, slice(46, 47)), expected)


# Case C: several sequences of one prompt.


@pytest.mark.parametrize("policy", EXACT)
def test_sampled_sequences_equal_those_of_dynamic_cache(covered: Session, policy: str) -> None:
    model = covered.model
    ids, mask = left_padded(tokens(2, PROMPT), (0, 6))
    texts = []
    for cache in (None, covered.new_cache(**EXACT[policy])):
        torch.manual_seed(0)
        options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 2, "new": 10}
        made = generate(
            model, ids.clone(), cache, attention_mask=mask, return_dict_in_generate=True, **options
        )
        texts.append(made.sequences.tolist())
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1], "both samples are the same: the test shows nothing"


def test_each_sampled_row_equals_its_own_run(
    llama: tuple[Any, Calibration], config: InfiniGenConfig
) -> None:
    """Rows draw from one random stream, so the check is on logits along each row's own text."""
    model, _ = llama
    ids = tokens(1, PROMPT)
    with attach(*llama, config) as session:
        torch.manual_seed(0)
        made = generate(
            model,
            ids,
            session.new_cache(),
            new=10,
            do_sample=True,
            num_return_sequences=2,
            return_dict_in_generate=True,
            output_logits=True,
        )
        together = torch.stack(made.logits, dim=1)
        for row in range(2):
            alone = run(model, session.new_cache(), made.sequences[row : row + 1], prompt=PROMPT)
            assert_close(together[row], alone[0, PROMPT - 1 : -1], atol=1e-4, rtol=1e-4)


# Case D: turns on one cache.


@pytest.mark.parametrize("policy", EXACT)
def test_turns_of_a_padded_batch_equal_each_row_alone(covered: Session, policy: str) -> None:
    model = covered.model
    lengths = ((13, 9, 11), (5, 12, 1))  # real tokens by turn and row
    answers, whole, mask = _chat(model, covered.new_cache(**EXACT[policy]), lengths)
    for row in range(3):
        alone = whole[row : row + 1, mask[row].bool()]
        # the last answer is the greedy continuation of everything before it
        expected = generate(model, alone, new=6)
        assert answers[row].tolist() == expected[0].tolist()


def test_turns_of_a_padded_batch_select_as_each_row_alone(
    llama: tuple[Any, Calibration], config: InfiniGenConfig
) -> None:
    model, _ = llama
    lengths = ((30, 21, 26), (5, 12, 2))
    with attach(*llama, config) as session:
        answers, _, _ = _chat(model, session.new_cache(), lengths)
        for row in range(3):
            single = tuple((turn[row],) for turn in lengths)
            alone, _, _ = _chat(model, session.new_cache(), single, first_row=row)
            assert answers[row].tolist() == alone[0].tolist()


def _chat(
    model: Any, cache: Any, lengths: tuple[tuple[int, ...], ...], first_row: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Turns of ``lengths`` real tokens and 6 generated ones each; last answer, all before, mask."""
    rows = len(lengths[0])
    ids = torch.zeros(rows, 0, dtype=torch.long)
    mask = ids.clone()
    answer = ids
    for turn, real in enumerate(lengths):
        width = max(real)
        said = torch.cat(
            [
                torch.nn.functional.pad(
                    tokens(1, real[row], seed=10 * turn + row + first_row), (width - real[row], 0)
                )
                for row in range(rows)
            ]
        )
        padding = torch.arange(width) >= width - torch.tensor(real)[:, None]
        ids = torch.cat([ids, answer, said], dim=1)
        mask = torch.cat([mask, torch.ones_like(answer), padding.long()], dim=1)
        answer = generate(model, ids, cache, attention_mask=mask, new=6)
    return answer, ids, mask


def test_turns_equal_one_run_on_the_whole_text(covered: Session) -> None:
    model = covered.model
    cache = covered.new_cache()
    ids = tokens(1, 15)
    for turn in range(3):
        ids = torch.cat([ids, generate(model, ids, cache, new=5), tokens(1, 4, seed=turn)], dim=1)
    assert generate(model, ids, cache, new=5).tolist() == generate(model, ids, new=5).tolist()


def test_copies_of_a_prompt_go_their_own_ways(
    fitted: tuple[Any, Calibration], config: InfiniGenConfig
) -> None:
    """`copy.deepcopy` of a prefilled cache is Transformers' own recipe for shared prompts."""
    model, _ = fitted
    ids, others = tokens(1, PROMPT), [tokens(1, 5, seed=seed) for seed in (1, 2)]
    with attach(*fitted, config) as session:
        prefilled = session.new_cache()
        run(model, prefilled, torch.cat([ids, others[0][:, :1]], 1), prompt=PROMPT)
        prefilled.recorder = FetchRecorder()
        for other in others:
            whole = torch.cat([ids, others[0][:, :1], other], 1)
            cache = deepcopy(prefilled)
            assert cache.recorder is None
            steps = range(PROMPT + 1, PROMPT + 6)
            actual = [feed(model, cache, whole, None, slice(at, at + 1)) for at in steps]
            expected = run(model, session.new_cache(), whole, prompt=PROMPT)[:, PROMPT + 1 :]
            assert_close(torch.cat(actual, 1), expected, atol=1e-4, rtol=1e-4)
    assert prefilled.get_seq_length() == PROMPT + 1


def test_turns_in_and_out_of_inference_mode(
    fitted: tuple[Any, Calibration], config: InfiniGenConfig
) -> None:
    model, _ = fitted
    ids = tokens(1, LENGTH)
    with attach(*fitted, config) as session:
        expected = run(model, session.new_cache(), ids[:, :42], prompt=PROMPT)
        cache = session.new_cache()
        with torch.inference_mode():
            model(ids[:, :PROMPT], cache=cache)
            model(ids[:, PROMPT : PROMPT + 1], cache=cache)
        actual = feed(model, cache, ids, None, slice(PROMPT + 1, PROMPT + 2))
        assert_close(actual, expected[:, -1:], atol=1e-4, rtol=1e-4)
        feed(model, cache, ids, None, slice(PROMPT + 2, LENGTH - 1))
        assert generate(model, ids, cache, new=2).shape == (1, 2)


# Case E: rows of different lengths.


@pytest.mark.parametrize("rehearsal", ["calibrated", "paper"])
@pytest.mark.parametrize("min_context", [8, 30])  # the short row starts above it, or below
def test_left_padded_row_selects_as_it_does_alone(
    fitted: tuple[Any, Calibration], rehearsal: str, min_context: int
) -> None:
    model, _ = fitted
    config, padding = selecting(rehearsal=rehearsal, min_context=min_context), 17
    ids, mask = left_padded(tokens(2, LENGTH), (0, padding))
    with attach(*fitted, config) as session:
        together, alone, long = (session.new_cache() for _ in range(3))
        traces = [recorded(cache) for cache in (together, alone, long)]
        logits = run(model, together, ids, mask, prompt=PROMPT)
        short = run(model, alone, ids[1:, padding:], prompt=PROMPT - padding)
        other = run(model, long, ids[:1], prompt=PROMPT)
    assert_close(logits[1, padding:], short[0], atol=1e-4, rtol=1e-4)
    assert_close(logits[0], other[0], atol=1e-4, rtol=1e-4)
    assert chosen(traces[0], row=0) == chosen(traces[2])
    by_row = chosen(traces[0], row=1, shift=padding)
    expected = chosen(traces[1])  # alone, the steps below min_context do not select at all
    assert by_row[len(by_row) - len(expected) :] == expected


def test_right_padded_batch(fitted: tuple[Any, Calibration], config: InfiniGenConfig) -> None:
    model, _ = fitted
    ids = tokens(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, PROMPT - 9 : PROMPT] = 0
    ids = ids.masked_fill(mask == 0, tiny.PAD_TOKEN)
    real = mask[1].bool()
    plain = reference(model, ids, mask, prompt=PROMPT)
    with attach(*fitted, config) as session:
        exact = run(model, session.new_cache(policy="ideal"), ids, mask, prompt=PROMPT)
        together = run(model, session.new_cache(), ids, mask, prompt=PROMPT)
        alone = run(model, session.new_cache(), ids[1:, real], prompt=PROMPT - 9)
    assert_close(exact[mask.bool()], plain[mask.bool()], atol=1e-4, rtol=1e-4)
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        return  # Transformers' windows count padding in the middle, so the row alone differs
    assert_close(together[1, real], alone[0], atol=1e-4, rtol=1e-4)


def test_row_of_padding_only_disturbs_no_one(
    llama: tuple[Any, Calibration], config: InfiniGenConfig
) -> None:
    model, _ = llama
    ids, mask = left_padded(tokens(2, LENGTH), (0, PROMPT))
    with attach(*llama, config) as session:
        together = run(model, session.new_cache(), ids, mask, prompt=PROMPT)
        alone = run(model, session.new_cache(), ids[:1], prompt=PROMPT)
    assert_close(together[0], alone[0], atol=1e-4, rtol=1e-4)
    assert together[1, PROMPT:].isfinite().all()
    expected = reference(model, ids[1:, PROMPT:], prompt=1)
    assert_close(together[1, PROMPT : PROMPT + 8], expected[0, :8], atol=1e-4, rtol=1e-4)


# Case F: dtypes.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_cache_follows_the_models_dtype(
    family: str, dtype: torch.dtype, config: InfiniGenConfig
) -> None:
    model = tiny.TINY[family]()
    calibration = calibrate_tiny(model)
    model = model.to(dtype)
    ids, mask = left_padded(tokens(2, LENGTH), (0, 9))
    expected = reference(model, ids, mask, prompt=PROMPT).float()
    with attach(model.float(), None) as _:
        exact = reference(model, ids, mask, prompt=PROMPT)
    model = model.to(dtype)
    everything = covering(rehearsal=config.rehearsal)
    calibration = calibrate_tiny(model)
    with attach(model, calibration, everything) as session:
        cache = session.new_cache()
        logits = run(model, cache, ids, mask, prompt=PROMPT)
    assert logits.dtype == dtype
    for layer in cache.offloaded:
        assert layer.pool.all()[0].dtype == dtype
    # as far from float32 as Transformers' own cache in this dtype, not further
    own = (expected - exact)[mask.bool()].abs().mean()
    ours = (logits.float() - exact)[mask.bool()].abs().mean()
    assert ours < 1.2 * own
    with attach(model, calibration, config) as session:
        assert run(model, session.new_cache(), ids, mask, prompt=PROMPT).isfinite().all()


# Case H: the wrong model.


@pytest.mark.parametrize("family", [*FAMILIES, "mistral_sliding"])
def test_cache_of_another_model_is_refused(family: str) -> None:
    first, second = tiny.TINY[family](), tiny.TINY[family]()
    ids = tokens(1, 6)
    with attach(first) as session:
        cache = session.new_cache(policy="ideal")
        feed(first, cache, ids, None, slice(0, 6))
        with pytest.raises(CacheStateError, match="made for"):
            feed(second, cache, ids, None, slice(0, 1))
        with attach(second), pytest.raises(CacheStateError, match="another model"):
            feed(second, cache, ids, None, slice(0, 1))
        assert cache.get_seq_length() == 6
        whole = torch.cat([ids, ids[:, :1]], 1)
        expected = reference(first, whole, prompt=7)[:, -1:]
        actual = feed(first, cache, whole, None, slice(6, 7))
        assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", [*FAMILIES, "mistral_sliding"])
def test_cache_after_its_session_is_refused(family: str) -> None:
    model = tiny.TINY[family]()
    ids = tokens(1, 6)
    with attach(model) as session:
        cache, unused = session.new_cache(policy="ideal"), session.new_cache(policy="ideal")
        feed(model, cache, ids, None, slice(0, 6))
    for stale in (cache, unused):
        with pytest.raises(CacheStateError, match="session"):
            feed(model, stale, ids, None, slice(0, 1))
        with attach(model), pytest.raises(CacheStateError, match="earlier attach"):
            feed(model, stale, ids, None, slice(0, 1))
    with pytest.raises(CacheStateError, match="session is over"):
        session.new_cache(policy="ideal")


def test_other_batch_on_the_same_cache_is_refused(llama: tuple[Any, Calibration]) -> None:
    with attach(*llama, selecting()) as session:
        cache = session.new_cache()
        feed(llama[0], cache, tokens(2, 12), None, slice(0, 12))
        with pytest.raises(CacheStateError, match="2 rows but the forward has 3"):
            feed(llama[0], cache, tokens(3, 12), None, slice(0, 1))
        assert cache.get_seq_length() == 12


# Case T: logical positions.


def test_length_and_positions_are_those_of_the_whole_text(
    llama: tuple[Any, Calibration], config: InfiniGenConfig
) -> None:
    model, _ = llama
    seen: list[list[int]] = []
    handle = model.model.layers[3].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"][0].tolist()),
        with_kwargs=True,
    )
    ids = tokens(1, PROMPT)
    with attach(*llama, config) as session:
        cache = session.new_cache()
        trace = recorded(cache)
        generate(model, ids, cache, new=6)
    handle.remove()
    assert seen == [list(range(PROMPT)), *([at] for at in range(PROMPT, PROMPT + 5))]
    assert cache.get_seq_length() == PROMPT + 5
    assert 0 < trace.fetched_share(first_layer=1) < 0.5


def test_without_position_ids_they_follow_the_cache(llama: tuple[Any, Calibration]) -> None:
    model, _ = llama
    ids = tokens(1, LENGTH)
    mask = torch.ones_like(ids)
    assert positions_of(mask).tolist() == [list(range(LENGTH))]
    with attach(*llama, selecting()) as session:
        given = run(model, session.new_cache(), ids, mask, prompt=PROMPT)
        assumed = run(model, session.new_cache(), ids, prompt=PROMPT)
    assert torch.equal(given, assumed)


# The helpers of these tests.


def test_positions_and_masks_of_reference_agree_with_the_model() -> None:
    model = tiny.llama()
    ids, mask = left_padded(tokens(2, 12), (0, 4))
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, position_ids=positions_of(mask)).logits
    stepped = run(model, DynamicCache(config=model.config), ids, mask, prompt=6)
    assert_close(stepped[mask.bool()], whole[mask.bool()], atol=1e-4, rtol=1e-4)


def test_a_step_leaves_no_cyclic_garbage(llama: tuple[Any, Any]) -> None:
    """Tensors in cycles wait for the collector, and the process grows step by step."""
    model, _ = llama
    with attach(*llama, selecting()) as session, torch.no_grad():
        cache = session.new_cache()
        run(model, cache, tokens(1, PROMPT + 2), prompt=PROMPT)
        gc.collect()
        gc.disable()
        try:
            feed(model, cache, tokens(1, PROMPT + 3), None, slice(PROMPT + 2, PROMPT + 3))
            assert gc.collect() == 0
        finally:
            gc.enable()
