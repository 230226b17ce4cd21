"""Rows of different lengths in one forward: each as in a run of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import DynamicCache

import tiny
from both_kernels import both_kernels  # noqa: F401
from calibrating import calibrate_tiny, covering, run, selecting, tokens
from infinigen_kv import CacheStateError, Calibration, UnsupportedModelError, attach
from infinigen_kv.batching.ragged import RaggedCache
from infinigen_kv.cache.forward import forward
from infinigen_kv.cache.layer import OffloadedLayer
from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.policies.query_predictor import QueryPredictor
from infinigen_kv.policies.registry import POLICIES
from infinigen_kv.storage.pools import linked
from infinigen_kv.storage.pools.linked import LinkedPool
from linking import APART, apart
from rows import play, random_script, single_run

FAMILIES = ("opt", "llama", "mistral_sliding", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_neox")
ROWS = 3
SCRIPT = random_script((30, 7, 52, 1, 41), (9, 12, 6, 10, 8), rows=ROWS, seed=1)
TOKENS = 64
CLOSE: dict[str, Any] = {"atol": 5e-5, "rtol": 1e-4}  # matrix products round by their width


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


def test_the_script_mixes_lengths_and_subsets() -> None:
    active: set[int] = set()
    partial = 0
    for kind, requests in SCRIPT.events:
        if kind == "join":
            active |= set(requests)
        elif kind == "leave":
            active -= set(requests)
        else:
            partial += 1 < len(requests) < len(active)
    assert partial > 0
    assert ("leave", (0,)) in SCRIPT.events


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_their_single_runs(family: str) -> None:
    model = tiny.TINY[family]()
    with attach(model, calibrate_tiny(model), selecting()) as session:
        with session.new_batch(rows=ROWS, tokens=TOKENS) as batch:
            found = play(batch, SCRIPT)
        for request, logits in found.items():
            assert_close(logits, single_run(session, SCRIPT, request), **CLOSE)


@pytest.mark.parametrize("family", ["opt", "qwen2", "gemma2"])
def test_a_batch_of_one_row_is_an_ordinary_cache(family: str) -> None:
    """To the last bit: every matrix product has one row in both."""
    model = tiny.TINY[family]()
    with attach(model, calibrate_tiny(model), selecting()) as session:
        with session.new_batch(rows=1, tokens=TOKENS) as batch:
            found = [play(batch, SCRIPT.alone(each))[each] for each in range(len(SCRIPT.prompts))]
        for request, logits in enumerate(found):
            assert torch.equal(logits, single_run(session, SCRIPT, request))


@pytest.mark.parametrize("family", sorted(tiny.TINY))
def test_full_attention_equals_transformers_own_cache(family: str) -> None:
    model = tiny.TINY[family]()
    expected = [
        run(model, DynamicCache(config=model.config), SCRIPT.ids(each), prompt=prompt)[0]
        for each, prompt in enumerate(SCRIPT.prompts)
    ]
    with (
        attach(model) as session,
        session.new_batch(rows=ROWS, tokens=TOKENS, policy="ideal") as batch,
    ):
        found = play(batch, SCRIPT)
    for request, logits in found.items():
        wanted = expected[request][SCRIPT.prompts[request] - 1 :]
        assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


def test_selecting_everything_equals_transformers_own_cache(llama: tuple[Any, Calibration]) -> None:
    model, _ = llama
    with (
        attach(*llama, covering()) as session,
        session.new_batch(rows=ROWS, tokens=TOKENS) as batch,
    ):
        found = play(batch, SCRIPT)
    for request, logits in found.items():
        prompt = SCRIPT.prompts[request]
        ids = SCRIPT.ids(request)
        expected = run(model, DynamicCache(config=model.config), ids, prompt=prompt)
        assert_close(logits, expected[0, prompt - 1 :], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy(llama: tuple[Any, Calibration], policy: str, tmp_path: Path) -> None:
    storage = apart("emulated", tmp_path)
    if policy.startswith("paging"):  # so that it shows what is left in the folder
        storage = apart("disk-emulated", tmp_path)
    with attach(*llama, selecting(), storage) as session:
        with session.new_batch(rows=ROWS, tokens=TOKENS, policy=policy) as batch:
            found = play(batch, SCRIPT)
        for request, logits in found.items():
            expected = single_run(session, SCRIPT, request, policy=policy, tokens=TOKENS)
            assert_close(logits, expected, **CLOSE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", APART)
def test_where_the_rows_live_does_not_show(
    llama: tuple[Any, Calibration], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linked, "RING", 4)
    with attach(*llama, selecting()) as session:
        with session.new_batch(
            rows=ROWS, tokens=TOKENS, storage=apart("emulated", tmp_path, link="none")
        ) as batch:
            expected = play(batch, SCRIPT)
        with session.new_batch(rows=ROWS, tokens=TOKENS, storage=apart(name, tmp_path)) as batch:
            found = play(batch, SCRIPT)
            assert batch.storage.link.statistics.bytes_down > 0
    assert all(torch.equal(found[each], expected[each]) for each in expected)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("changes", [{"codec": "int8"}, {"codec": "int4"}, {"capacity": 24}])
def test_packed_and_limited_homes(
    llama: tuple[Any, Calibration], changes: dict[str, Any], tmp_path: Path
) -> None:
    storage = apart("resident-some", tmp_path, **changes)
    with attach(*llama, selecting(), storage) as session:
        with session.new_batch(rows=ROWS, tokens=TOKENS) as batch:
            found = play(batch, SCRIPT)
        for request, logits in found.items():
            assert_close(logits, single_run(session, SCRIPT, request, tokens=TOKENS), **CLOSE)


# Neighbours.

REQUESTS = st.lists(st.tuples(st.integers(1, 45), st.integers(1, 8)), min_size=2, max_size=6)


@settings(max_examples=15)
@given(requests=REQUESTS, rows=st.integers(2, 4), seed=st.integers(0, 2**16))
def test_a_row_does_not_depend_on_its_neighbours(
    llama: tuple[Any, Calibration], requests: list[tuple[int, int]], rows: int, seed: int
) -> None:
    """To the last bit, whatever joins, steps and leaves beside it, and in which place."""
    prompts, new = zip(*requests, strict=True)
    script = random_script(prompts, new, rows=rows, seed=seed)
    with (
        attach(*llama, selecting()) as session,
        session.new_batch(rows=rows, tokens=TOKENS) as batch,
    ):
        found = play(batch, script)
        for request, logits in found.items():
            assert torch.equal(logits, play(batch, script.alone(request))[request])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_script_alone_and_together(dtype: torch.dtype) -> None:
    model = tiny.llama().to(dtype)
    with (
        attach(model, calibrate_tiny(model), selecting()) as session,
        session.new_batch(rows=ROWS, tokens=TOKENS) as batch,
    ):
        found = play(batch, SCRIPT)
        for request, logits in found.items():
            assert torch.equal(logits, play(batch, SCRIPT.alone(request))[request])


def test_a_width_that_follows_the_rows(llama: tuple[Any, Calibration]) -> None:
    with attach(*llama, selecting()) as session:
        with session.new_batch(rows=ROWS, tokens=TOKENS, fixed_width=False) as batch:
            found = play(batch, SCRIPT)
        for request, logits in found.items():
            assert_close(logits, single_run(session, SCRIPT, request), **CLOSE)


# What runs once, and what runs row by row.


def test_the_model_runs_once_for_all_rows(
    llama: tuple[Any, Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = llama
    shapes: list[torch.Size] = []
    predicted: list[torch.Size] = []
    plain = QueryPredictor.__call__

    def predict(self: QueryPredictor, hidden: torch.Tensor, step: Any) -> torch.Tensor:
        predicted.append(hidden.shape)
        return plain(self, hidden, step)

    monkeypatch.setattr(QueryPredictor, "__call__", predict)
    with (
        attach(*llama, selecting()) as session,
        session.new_batch(rows=4, tokens=TOKENS) as batch,
    ):
        rows = [batch.join(tokens(1, length)) for length in (30, 12, 21)]
        handle = model.model.layers[2].mlp.register_forward_pre_hook(
            lambda module, seen: shapes.append(seen[0].shape)
        )
        batch.step(rows, [5, 6, 7])
        handle.remove()
    assert shapes == [(4, 1, 32)]
    assert predicted == [(4, 1, 32)] * 3, "once for each layer that selects"


def test_each_row_selects_as_much_as_alone(llama: tuple[Any, Calibration]) -> None:
    """A short row attends to everything while its neighbours select."""
    recorders = [FetchRecorder(), FetchRecorder()]
    with (
        attach(*llama, selecting(min_context=20)) as session,
        session.new_batch(rows=2, tokens=TOKENS) as batch,
    ):
        rows = [batch.join(tokens(1, length, seed=length)) for length in (10, 48)]
        for row, recorder in zip(rows, recorders, strict=True):
            row.cache.recorder = recorder
        for token in range(3, 8):
            batch.step(rows, [token, token])
    shares = [recorder.fetched_share(first_layer=1) for recorder in recorders]
    assert not shares[0] < 1
    assert shares[1] < 0.5


@pytest.mark.parametrize("policy", ["stream", "infinigen"])
def test_entries_move_before_the_layer_wants_them(
    llama: tuple[Any, Calibration],
    policy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of every row, whether it selects or not."""
    ahead: list[tuple[int, bool]] = []
    plain = OffloadedLayer.attend

    def attend(layer: OffloadedLayer, *given: Any, **options: Any) -> Any:
        assert isinstance(layer.pool, LinkedPool)
        ahead.append((layer.spec.index, layer.pool._fetch is not None))
        return plain(layer, *given, **options)

    storage = apart("emulated", tmp_path)
    with (
        attach(*llama, selecting(min_context=20), storage) as session,
        session.new_batch(rows=2, tokens=TOKENS, policy=policy) as batch,
    ):
        rows = [batch.join(tokens(1, length)) for length in (10, 48)]
        batch.step(rows, [3, 4])
        monkeypatch.setattr(OffloadedLayer, "attend", attend)
        batch.step(rows, [3, 4])
    assert ahead == [(layer, True) for layer in range(4) for _ in rows]


# Use that is not meant.


def test_only_a_batch_feeds_its_rows(llama: tuple[Any, Calibration]) -> None:
    model, _ = llama
    with (
        attach(*llama, selecting()) as session,
        session.new_batch(rows=2, tokens=TOKENS) as batch,
    ):
        rows = [batch.join(tokens(1, length)) for length in (10, 20)]
        cache = RaggedCache([row.cache for row in rows], 2)
        with pytest.raises(CacheStateError, match=r"InfiniGenBatch\.step"):
            forward(model, tokens(2, 1), cache)
        for queries, mask in ((2, None), (1, torch.ones(2, 21))):
            inputs: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
            refused = pytest.raises(CacheStateError, match="one token each")
            with refused, cache.one_token():
                forward(model, tokens(2, queries), cache, **inputs)
        assert [row.length for row in rows] == [10, 20]
        batch.step(rows, [3, 4])
        assert [row.length for row in rows] == [11, 21]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_longest_row(kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0}
    if kind == "longrope":
        rope["original_max_position_embeddings"] = 64
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    positions = 64 if kind == "dynamic" else 512
    model = tiny.llama(rope_parameters=rope, max_position_embeddings=positions)
    script = random_script((30, 50, 8), (5, 9, 12), rows=2)
    with attach(model) as session:
        if kind == "longrope":
            with pytest.raises(UnsupportedModelError, match=r"tokens=64"):
                session.new_batch(tokens=65, policy="ideal")
        with session.new_batch(rows=2, tokens=64, policy="ideal") as batch:
            found = play(batch, script)
        for request, logits in found.items():
            expected = single_run(session, script, request, policy="ideal")
            assert_close(logits, expected, **CLOSE)
