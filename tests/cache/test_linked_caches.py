"""Caches with a home apart from the device against caches on the device, bit for bit."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from both_kernels import both_kernels  # noqa: F401
from calibrating import (
    calibrate_tiny,
    covering,
    feed,
    generate,
    left_padded,
    reference,
    run,
    selecting,
    tokens,
)
from infinigen_kv import CacheStateError, Calibration, InfiniGenConfig, Session, attach
from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.storage.pools import linked
from infinigen_kv.storage.pools.linked import LinkedPool
from linking import APART, apart, delays, local_cache, same, without_threads

FAMILIES = ("llama", "gemma3", "qwen2")
POLICIES = ("infinigen", "infinigen-paper", "stream")
PROMPT, LENGTH = 40, 52
PADDING = (0, 9, 3)
RING = 4  # newest tokens that a resident set keeps, few enough for prompts as short as these


@pytest.fixture(autouse=True)
def short_ring_and_cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that entries of the prompt are not on the device before a step has wanted them."""
    monkeypatch.setattr(linked, "RING", RING)
    monkeypatch.setattr(LinkedPool, "fill_resident", lambda pool, *entries: None)


@pytest.fixture(scope="module", params=FAMILIES)
def fitted(request: pytest.FixtureRequest) -> tuple[Any, Calibration]:
    model = tiny.TINY[request.param]()
    return model, calibrate_tiny(model)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


def padded_logits(session: Session, cache: InfiniGenCache) -> Tensor:
    ids, mask = left_padded(tokens(3, LENGTH), PADDING)
    return run(session.model, cache, ids, mask, prompt=PROMPT)


# Where the KV lives and how it moves must not show.


@pytest.mark.parametrize("policy", POLICIES)
def test_every_home_and_link_gives_the_same_logits(
    fitted: tuple[Any, Calibration], policy: str, tmp_path: Path
) -> None:
    with attach(*fitted, selecting()) as session:
        local = local_cache(session, policy)
        local.recorder = FetchRecorder()
        expected = padded_logits(session, local)
        if policy != "stream":
            assert 0 < local.recorder.fetched_share(first_layer=1) < 0.6
        for name in APART:
            storage = apart(name, tmp_path)
            cache = session.new_cache(policy=policy, storage=storage, tokens=LENGTH)
            assert same(padded_logits(session, cache), expected), name
            assert all(isinstance(layer.pool, LinkedPool) for layer in cache.offloaded)
            assert cache.home_bytes > 0 and (cache.storage.bytes_on_disk > 0) == ("disk" in name)
            cache.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tokens_known", [0, 10, 1000])
def test_tokens_that_a_cache_is_made_for_are_no_limit(
    llama: tuple[Any, Calibration], tokens_known: int, tmp_path: Path
) -> None:
    with attach(*llama, selecting()) as session:
        expected = padded_logits(session, local_cache(session))
        for name in ("emulated", "resident-some", "disk-resident"):
            cache = session.new_cache(storage=apart(name, tmp_path), tokens=tokens_known)
            assert same(padded_logits(session, cache), expected), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_moves_unchanged(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny.llama().to(dtype)
    calibration = calibrate_tiny(model)
    with attach(model, calibration, selecting()) as session:
        expected = padded_logits(session, local_cache(session))
        for name in ("resident-some", "disk"):
            cache = session.new_cache(storage=apart(name, tmp_path), tokens=LENGTH)
            assert same(padded_logits(session, cache), expected), name


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["emulated", "resident-some", "disk", "disk-resident"])
def test_late_transfers_change_nothing(
    llama: tuple[Any, Calibration],
    policy: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with attach(*llama, selecting()) as session:
        storage = apart(name, tmp_path)
        with without_threads(monkeypatch):
            synchronous = session.new_cache(policy=policy, storage=storage, tokens=LENGTH)
        assert synchronous.storage.link.readers is None
        expected = padded_logits(session, synchronous)
        with delays(monkeypatch, seed=1):
            cache = session.new_cache(policy=policy, storage=storage, tokens=LENGTH)
            assert same(padded_logits(session, cache), expected)
            cache.close()


def test_layers_that_stay_on_the_device_move_nothing(
    llama: tuple[Any, Calibration], tmp_path: Path
) -> None:
    """`resident_layers` are attended to in full: with all of them nothing is left to select."""
    model, _ = llama
    ids = tokens(2, LENGTH)
    expected = reference(model, ids, prompt=PROMPT)
    with attach(*llama, selecting()) as session:
        storage = apart("disk", tmp_path, resident_layers=(0, 1, 2, 3))
        cache = session.new_cache(storage=storage, tokens=LENGTH)
        torch.testing.assert_close(
            run(model, cache, ids, prompt=PROMPT), expected, atol=1e-4, rtol=1e-4
        )
        assert cache.home_bytes == 0
        assert cache.storage.link.statistics.bytes_down == 0
        some = session.new_cache(storage=apart("emulated", tmp_path, resident_layers=(0, 2)))
        run(model, some, ids, prompt=PROMPT)
        kinds = [type(layer.pool).__name__ for layer in some.offloaded]
        assert kinds == ["LocalPool", "LinkedPool", "LocalPool", "LinkedPool"]


# What crosses the link.

LAYERS = 3  # those that select, in the next tests
HEADS = 2


def selected(trace: FetchRecorder) -> list[tuple[int, set[tuple[int, int, int]]]]:
    """Per layer and step, in order, the (row, head, token) that were selected."""
    found = []
    for layer, selection in trace.selections:
        index = selection.index[:, :, 0]
        rows, heads, columns = index.shape
        counts = selection.counts
        found.append(
            (
                layer,
                {
                    (row, head, token)
                    for row in range(rows)
                    for head in range(heads)
                    for token in index[row, head].tolist()[
                        : columns if counts is None else int(counts[row, 0])
                    ]
                },
            )
        )
    return found


@pytest.fixture(params=[(0, 0, 0), PADDING], ids=["equal-rows", "padded-rows"])
def batch(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
    return left_padded(tokens(3, LENGTH), request.param)


def traced_steps(
    session: Session, name: str, batch: tuple[Tensor, Tensor], folder: Path
) -> tuple[InfiniGenCache, list[tuple[int, set[tuple[int, int, int]]]]]:
    """A cache after all steps, its counters set back after the first one, and its selections."""
    ids, mask = batch
    # layer 0 does not select, so it would move everything
    storage = apart(name, folder, resident_layers=(0,))
    cache = session.new_cache(storage=storage, tokens=LENGTH)
    cache.recorder = trace = FetchRecorder(keep_indices=True)
    run(session.model, cache, ids[:, : PROMPT + 1], mask[:, : PROMPT + 1], prompt=PROMPT)
    cache.reset_statistics()  # the first step reads everything, for the partial keys
    for at in range(PROMPT + 1, LENGTH):
        feed(session.model, cache, ids, mask, slice(at, at + 1))
    return cache, selected(trace)


@pytest.mark.parametrize("name", ["emulated", "disk"])
def test_without_resident_set_what_is_selected_crosses(
    llama: tuple[Any, Calibration], name: str, batch: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    with attach(*llama, selecting()) as session:
        cache, wanted = traced_steps(session, name, batch, tmp_path)
        link = cache.storage.link.statistics
    steps = LENGTH - PROMPT - 1
    entry = 2 * 16 * 4  # key and value of 16 float32 each
    assert link.bytes_down == entry * sum(len(each) for _, each in wanted[LAYERS:])
    assert link.bytes_up == entry * LAYERS * 3 * HEADS * steps
    assert link.transfers == LAYERS * steps
    assert cache.resident_hit_rate == 0


@pytest.mark.parametrize("name", ["resident-all", "disk-resident-all"])
def test_what_is_resident_does_not_cross_again(
    llama: tuple[Any, Calibration], name: str, batch: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    """With room for everything, entries cross once; those in the ring of new tokens do not."""
    with attach(*llama, selecting()) as session:
        cache, wanted = traced_steps(session, name, batch, tmp_path)
        link = cache.storage.link.statistics
    fetched: dict[int, set[tuple[int, int, int]]] = {1: set(), 2: set(), 3: set()}
    missing = total = 0
    for number, (layer, each) in enumerate(wanted):
        at = PROMPT + number // LAYERS
        lacked = {item for item in each if item[2] < at - RING} - fetched[layer]
        fetched[layer] |= lacked
        if number >= LAYERS:
            missing, total = missing + len(lacked), total + len(each)
    assert 0 < missing < 0.7 * total, "the test shows nothing"
    assert link.bytes_down == 2 * 16 * 4 * missing
    assert cache.resident_hit_rate == pytest.approx(1 - missing / total)


def test_streaming_moves_every_layer_once_a_step(
    llama: tuple[Any, Calibration], batch: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    ids, mask = batch
    with attach(*llama, selecting()) as session:
        storage = apart("emulated", tmp_path)
        cache = session.new_cache(policy="stream", storage=storage, tokens=LENGTH)
        feed(session.model, cache, ids, mask, slice(0, PROMPT))
        assert cache.storage.link.statistics.bytes_down == 0, "a prompt needs nothing moved"
        for at in range(PROMPT, LENGTH):
            feed(session.model, cache, ids, mask, slice(at, at + 1))
        link = cache.storage.link.statistics
    token = 2 * 16 * 4 * 3 * HEADS
    # of layer 0 each step moves what the next one needs, besides the first step's
    every = sum(4 * at for at in range(PROMPT, LENGTH)) + LENGTH
    assert link.bytes_down == token * every
    assert link.bytes_up == token * 4 * LENGTH


# Case I: when it starts to cross.


@pytest.mark.parametrize(
    ("family", "policy", "expected"),
    [
        ("llama", "infinigen", "move1 attend0 move2 attend1 move3 attend2 move0 attend3"),
        ("llama", "stream", "move1 attend0 move2 attend1 move3 attend2 move0 attend3"),
        # layers 0 and 2 are sliding: the next one with a home is meant, as soon as it can be
        ("gemma3", "infinigen", "move1 attend0 attend1 move3 attend2 attend3"),
        ("gemma3", "stream", "move1 attend0 attend1 move3 attend2 attend3"),
    ],
)
def test_a_layer_is_moved_while_the_one_before_computes(
    family: str, policy: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tiny.TINY[family]()
    ids = tokens(1, PROMPT + 3)
    with attach(model, calibrate_tiny(model), selecting()) as session:
        storage = apart("emulated", tmp_path)
        cache = session.new_cache(policy=policy, storage=storage, tokens=LENGTH)
        run(model, cache, ids[:, : PROMPT + 2], prompt=PROMPT)
        events: list[str] = []
        layer_of = {id(layer.pool._home.store): layer.spec.index for layer in cache.offloaded}
        link = cache.storage.link
        for name in ("fetch", "fetch_all"):
            _watch(monkeypatch, link, name, lambda store: f"move{layer_of[id(store)]}", events)
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.register_forward_pre_hook(
                lambda *seen, index=index: events.append(f"attend{index}")
            )
        feed(model, cache, ids, None, slice(PROMPT + 2, PROMPT + 3))
    assert " ".join(events) == expected


def _watch(
    monkeypatch: pytest.MonkeyPatch, link: Any, name: str, event: Any, events: list[str]
) -> None:
    original = getattr(link, name)

    def watched(store: Any, *given: Any) -> Any:
        events.append(event(store))
        return original(store, *given)

    monkeypatch.setattr(link, name, watched)


# Operations on the cache.


@pytest.fixture(params=["resident-some", "disk-resident"])
def storage_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("padding", [(0, 0), (0, 5)])
def test_beam_search(
    llama: tuple[Any, Calibration], storage_name: str, padding: tuple[int, int], tmp_path: Path
) -> None:
    model, _ = llama
    ids, mask = left_padded(tokens(2, PROMPT), padding)
    options: dict[str, Any] = {
        "num_beams": 3,
        "num_return_sequences": 2,
        "return_dict_in_generate": True,
        "output_scores": True,
        "attention_mask": mask,
        "new": 8,
    }
    with attach(*llama, selecting()) as session:
        expected = generate(model, ids, local_cache(session), **options)
        cache = session.new_cache(storage=apart(storage_name, tmp_path), tokens=LENGTH)
        actual = generate(model, ids, cache, **options)
    assert actual.sequences.tolist() == expected.sequences.tolist()
    assert same(actual.sequences_scores, expected.sequences_scores)


def test_sampled_sequences(
    llama: tuple[Any, Calibration], storage_name: str, tmp_path: Path
) -> None:
    model, _ = llama
    ids = tokens(2, PROMPT)
    made = []
    with attach(*llama, selecting()) as session:
        moved = session.new_cache(storage=apart(storage_name, tmp_path), tokens=LENGTH)
        for cache in (local_cache(session), moved):
            torch.manual_seed(3)
            options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 2}
            made.append(generate(model, ids, cache, new=8, **options).tolist())
    assert made[0] == made[1]
    assert made[0][0] != made[0][1]


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_reordered_repeated_and_dropped(
    llama: tuple[Any, Calibration], storage_name: str, policy: str, tmp_path: Path
) -> None:
    model, _ = llama
    results = []
    with attach(*llama, selecting()) as session:
        moved = session.new_cache(
            policy=policy, storage=apart(storage_name, tmp_path), tokens=LENGTH
        )
        for cache in (local_cache(session, policy), moved):
            ids, mask = left_padded(tokens(3, LENGTH), PADDING)
            run(model, cache, ids[:, :44], mask[:, :44], prompt=PROMPT)
            logits = []
            for change, rows in (
                ("reorder_cache", [2, 0, 0]),
                ("batch_repeat_interleave", [0, 0, 1, 1, 2, 2]),
                ("batch_select_indices", [5, 1, 2, 2]),
            ):
                argument: Any = 2 if "repeat" in change else torch.tensor(rows)
                getattr(cache, change)(argument)
                ids, mask = ids[rows], mask[rows]
                at = cache.get_seq_length()
                logits += [feed(model, cache, ids, mask, slice(at, at + 1)) for at in (at, at + 1)]
            results.append(torch.cat(logits))
    assert same(results[1], results[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_crop_and_another_continuation(
    llama: tuple[Any, Calibration], storage_name: str, policy: str, tmp_path: Path
) -> None:
    model, _ = llama
    ids, other = tokens(2, LENGTH), tokens(2, LENGTH, seed=1)
    results = []
    with attach(*llama, selecting()) as session:
        moved = session.new_cache(
            policy=policy, storage=apart(storage_name, tmp_path), tokens=LENGTH
        )
        for cache in (local_cache(session, policy), moved):
            run(model, cache, ids, prompt=PROMPT)
            cache.crop(-6)
            logits = [feed(model, cache, other, None, slice(at, at + 1)) for at in range(3)]
            cache.crop(20)
            logits += [feed(model, cache, other, None, slice(4, 9))]
            logits += [feed(model, cache, other, None, slice(at, at + 1)) for at in range(9, 12)]
            cache.crop(-1000)
            logits += [run(model, cache, other, prompt=PROMPT)]
            results.append(torch.cat([each.flatten() for each in logits]))
    assert same(results[1], results[0])


@pytest.mark.parametrize("config", [selecting(), covering()], ids=["selecting", "covering"])
def test_assisted_decoding(
    llama: tuple[Any, Calibration], storage_name: str, config: InfiniGenConfig, tmp_path: Path
) -> None:
    model, _ = llama
    assistant = tiny.llama()
    noise = torch.Generator().manual_seed(0)
    for parameter in assistant.parameters():  # some drafts are right, some are not
        parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    ids = tokens(1, PROMPT)
    with attach(*llama, config) as session:
        moved = session.new_cache(storage=apart(storage_name, tmp_path), tokens=LENGTH)
        expected, actual = (
            generate(model, ids, cache, new=10, assistant_model=assistant)
            for cache in (local_cache(session), moved)
        )
    assert actual.tolist() == expected.tolist()
    if config.max_fetch == 1.0:
        assert actual.tolist() == generate(model, ids, new=10).tolist()


def test_several_turns(fitted: tuple[Any, Calibration], storage_name: str, tmp_path: Path) -> None:
    model, _ = fitted
    texts = []
    with attach(*fitted, selecting()) as session:
        for cache in (
            local_cache(session),
            session.new_cache(storage=apart(storage_name, tmp_path), tokens=2 * LENGTH),
        ):
            ids = tokens(2, 20)
            for turn in range(3):
                answer = generate(model, ids, cache, new=5)
                ids = torch.cat([ids, answer, tokens(2, 1 + 3 * turn, seed=turn)], dim=1)
            cache.reset()
            after = generate(model, ids, cache, new=5)
            texts.append([ids.tolist(), after.tolist()])
    assert texts[0] == texts[1]


def test_copies_go_their_own_ways(llama: tuple[Any, Calibration], tmp_path: Path) -> None:
    model, _ = llama
    ids, others = tokens(2, PROMPT + 2), [tokens(2, 6, seed=seed) for seed in (1, 2)]
    results = []
    with attach(*llama, selecting()) as session:
        moved = session.new_cache(storage=apart("resident-some", tmp_path), tokens=LENGTH)
        for cache in (local_cache(session), moved):
            run(model, cache, ids, prompt=PROMPT)
            logits = []
            for other in others:
                copy = deepcopy(cache)
                logits += [feed(model, copy, other, None, slice(at, at + 1)) for at in range(6)]
            logits += [feed(model, cache, others[0], None, slice(at, at + 1)) for at in range(6)]
            results.append(torch.stack(logits))
    assert same(results[1], results[0])
    assert torch.equal(results[1][:6], results[1][12:])


def test_a_closed_cache_leaves_its_copy_usable(
    llama: tuple[Any, Calibration], tmp_path: Path
) -> None:
    model, _ = llama
    ids = tokens(2, LENGTH)
    with attach(*llama, selecting()) as session:
        expected = run(model, local_cache(session), ids, prompt=PROMPT)[:, PROMPT:]
        cache = session.new_cache(storage=apart("resident-some", tmp_path), tokens=LENGTH)
        feed(model, cache, ids, None, slice(0, PROMPT))
        copy = deepcopy(cache)
        cache.close()
        steps = range(PROMPT, LENGTH)
        actual = torch.cat([feed(model, copy, ids, None, slice(at, at + 1)) for at in steps], 1)
    assert same(actual, expected)


def test_a_cache_on_disk_is_not_copied(llama: tuple[Any, Calibration], tmp_path: Path) -> None:
    model, _ = llama
    ids = tokens(1, PROMPT + 1)
    with attach(*llama, selecting()) as session:
        cache = session.new_cache(storage=apart("disk", tmp_path), tokens=LENGTH)
        feed(model, cache, ids, None, slice(0, PROMPT))
        with pytest.raises(CacheStateError, match="disk cannot be copied"):
            deepcopy(cache)
        actual = feed(model, cache, ids, None, slice(PROMPT, PROMPT + 1))
        expected = run(model, local_cache(session), ids, prompt=PROMPT)[:, PROMPT:]
    assert same(actual, expected)


def test_several_queries_that_select(
    llama: tuple[Any, Calibration], storage_name: str, tmp_path: Path
) -> None:
    """As in the measurement of perplexity: one forward, each token with its own selection."""
    model, _ = llama
    ids, mask = left_padded(tokens(2, LENGTH), (0, 7))
    results = []
    with attach(*llama, selecting()) as session:
        moved = session.new_cache(storage=apart(storage_name, tmp_path), tokens=LENGTH)
        for cache in (local_cache(session), moved):
            feed(model, cache, ids, mask, slice(0, PROMPT))
            with cache.decoding():
                logits = [feed(model, cache, ids, mask, slice(PROMPT, PROMPT + 5))]
            steps = range(PROMPT + 5, LENGTH)
            logits += [feed(model, cache, ids, mask, slice(at, at + 1)) for at in steps]
            results.append(torch.cat(logits, dim=1))
    assert same(results[1], results[0])


def test_covering_selection_over_a_link_equals_transformers(
    fitted: tuple[Any, Calibration], storage_name: str, tmp_path: Path
) -> None:
    model, _ = fitted
    ids, mask = left_padded(tokens(3, LENGTH), PADDING)
    expected = reference(model, ids, mask, prompt=PROMPT)[mask.bool()]
    with attach(*fitted, covering()) as session:
        cache = session.new_cache(storage=apart(storage_name, tmp_path), tokens=LENGTH)
        actual = run(model, cache, ids, mask, prompt=PROMPT)[mask.bool()]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("home", ["emulated", "disk"])
@pytest.mark.parametrize("known", [0, PROMPT + 60])
def test_more_bytes_for_the_resident_set_than_there_are(
    llama: tuple[Any, Calibration], home: str, known: int, tmp_path: Path
) -> None:
    """It takes what there is, and grows with a text whose length was not known."""
    ids = tokens(2, PROMPT + 60)
    with attach(*llama, selecting()) as session:
        expected = run(session.model, local_cache(session, tokens=known), ids, prompt=PROMPT)
        storage = apart(home, tmp_path, resident=10**12)
        cache = session.new_cache(storage=storage, tokens=known)
        assert same(run(session.model, cache, ids, prompt=PROMPT), expected)
        sets = [layer.pool._resident for layer in cache.offloaded]
        assert all(PROMPT < each.budget <= 3 * ids.shape[1] // 2 for each in sets)
        assert cache.resident_hit_rate > 0.5
