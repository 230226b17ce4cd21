"""Limited homes in the engine, against runs of the plain model that masks evicted tokens out."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

import tiny
from calibrating import (
    calibrate_tiny,
    covering,
    feed,
    generate,
    left_padded,
    positions_of,
    run,
    selecting,
    tokens,
)
from infinigen_kv import CacheStateError, Calibration, Session, attach
from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.cache.forward import cache_argument
from infinigen_kv.policies.candidates import HeldCandidates
from infinigen_kv.policies.step import Step
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv.storage.homes.slots import EVICTIONS, Eviction
from infinigen_kv.storage.pools import linked
from infinigen_kv.storage.pools.linked import LinkedPool
from linking import APART, apart, local_cache, same

PROMPT, LENGTH = 40, 64
CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(autouse=True)
def short_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linked, "RING", 4)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def fitted(request: pytest.FixtureRequest) -> tuple[Any, Calibration]:
    model = tiny.TINY[request.param]()
    return model, calibrate_tiny(model)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


def held_before(
    piece: slice, pieces: list[slice], capacity: int, sinks: int, padding: int
) -> list[int]:
    """Tokens of a row that are left when ``piece`` begins, token by token: after each forward the
    oldest go until the others fit, but for the first ``sinks`` real ones.
    """
    first = range(padding, padding + min(sinks, capacity - 2))
    held: list[int] = []
    for earlier in pieces[: pieces.index(piece)]:
        held += range(earlier.start, earlier.stop)
        while len(held) > capacity:
            held.remove(next(token for token in held if token not in first))
    return held


@torch.no_grad()
def oldest_dropped(
    model: Any, ids: Tensor, mask: Tensor, pieces: list[slice], capacity: int, sinks: int
) -> Tensor:
    """The plain model, each piece attending to what `held_before` it and causally to itself."""
    cache = DynamicCache()
    logits = []
    for piece in pieces:
        key = torch.arange(piece.stop)
        query = key[piece, None]
        visible = ((key >= piece.start) & (key <= query)).repeat(len(ids), 1, 1, 1)
        for row, padding in enumerate((mask == 0).sum(dim=1).tolist()):
            visible[row, ..., held_before(piece, pieces, capacity, sinks, padding)] = True
        visible &= mask[:, None, None, : piece.stop].bool()
        # a row of padding sees itself, since the plain model's softmax needs something
        visible |= (key == query) & (mask[:, None, piece, None] == 0)
        arguments = {cache_argument(model): cache}
        logits.append(
            model(
                input_ids=ids[:, piece],
                attention_mask=visible,
                position_ids=positions_of(mask)[:, piece],
                **arguments,
            ).logits
        )
    return torch.cat(logits, dim=1)


def fed(model: Any, cache: Any, ids: Tensor, mask: Tensor, pieces: list[slice]) -> Tensor:
    return torch.cat([feed(model, cache, ids, mask, piece) for piece in pieces], dim=1)


def cuts(*lengths: int) -> list[slice]:
    """Consecutive pieces of these lengths."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return [slice(*pair) for pair in pairwise(ends)]


def limited(
    session: Session, capacity: int | float, evict: Eviction = "fifo", **options: Any
) -> InfiniGenCache:
    policy = options.pop("policy", "infinigen")
    storage = StorageConfig(capacity=capacity, evict=evict, resident_layers=(), **options)
    return session.new_cache(policy=policy, storage=storage, tokens=LENGTH)


# Room for everything.


@pytest.mark.parametrize(
    ("policy", "evict"),
    [
        ("infinigen", "fifo"),
        ("infinigen", "counter"),
        ("infinigen-paper", "lru"),
        ("stream", "lru"),
    ],
)
def test_a_limit_that_is_never_reached_changes_nothing(
    fitted: tuple[Any, Calibration], policy: str, evict: Eviction
) -> None:
    model, _ = fitted
    ids, mask = left_padded(tokens(3, LENGTH), (0, 9, 3))
    with attach(*fitted, selecting()) as session:
        expected = run(model, local_cache(session, policy), ids, mask, prompt=PROMPT)
        for capacity, resident in ((LENGTH, 0), (1.0, 0), (1000, 0.5)):
            cache = limited(session, capacity, evict, policy=policy, resident=resident)
            actual = run(model, cache, ids, mask, prompt=PROMPT)
            if policy == "infinigen":  # its tail reads partial keys: those put in slots are rounded
                assert_close(actual, expected, **CLOSE)  # in another order than appended ones
            else:
                assert same(actual, expected)
            assert cache.offloaded[0].pool.positions is None
            if len(cache.offloaded) == len(cache.layers):
                cache.crop(-5)  # nothing was evicted, so tokens can be taken back
                again = fed(model, cache, ids, mask, cuts(*[1] * LENGTH)[-5:])
                assert_close(again, expected[:, -5:], **CLOSE)


# The oldest tokens go.


@pytest.mark.parametrize(
    ("capacity", "pieces"),
    [
        (30, cuts(20, *[1] * 30)),
        (30, cuts(40, *[1] * 20)),  # a prompt longer than the capacity
        (2, cuts(6, *[1] * 10)),
        (30, cuts(25, 1, 1, 12, 1, 1, 1, 1, 31, 1, 1)),  # turns; one longer than the capacity
        (30, cuts(29, 1, 1, 1, 30, 1)),
        (30, cuts(30, 1, 1)),
        (16, cuts(16, 16, 16, 1, 1)),  # chunks that replace everything
        (8, cuts(5, 5, 5, 5, 1, 1)),  # chunks that are all padding
        (8, cuts(*[1] * 24)),
    ],
)
@pytest.mark.parametrize("padding", [(0, 0, 0), (0, 11, 3)])
@pytest.mark.parametrize("sinks", [0, 2])
def test_a_stream_of_the_newest_tokens_and_the_sinks(
    llama: tuple[Any, Calibration],
    capacity: int,
    pieces: list[slice],
    padding: tuple[int, ...],
    sinks: int,
) -> None:
    model, _ = llama
    ids, mask = left_padded(tokens(3, pieces[-1].stop), padding)
    expected = oldest_dropped(model, ids, mask, pieces, capacity, sinks)
    with attach(*llama, selecting(sink_tokens=sinks)) as session:
        cache = limited(session, capacity, policy="stream")
        actual = fed(model, cache, ids, mask, pieces)
        for layer in cache.offloaded:
            positions = layer.pool.positions
            assert positions is not None
            end = slice(pieces[-1].stop, pieces[-1].stop + 1)
            held = [held_before(end, [*pieces, end], capacity, sinks, each) for each in padding]
            assert [sorted(row) for row in positions.tolist()] == held
    assert cache.get_seq_length() == pieces[-1].stop
    assert_close(actual[mask.bool()], expected[mask.bool()], **CLOSE)


# Padding is never fetched, so its counters and those of its heirs are lower.
@pytest.mark.parametrize(
    ("evict", "padding"),
    [(evict, (0, 0, 0)) for evict in EVICTIONS]
    + [(evict, (0, 11, 3)) for evict in EVICTIONS if evict != "counter"],
)
@pytest.mark.parametrize("resident", [0, 0.3, 1.0])
def test_a_selection_of_everything_held(
    llama: tuple[Any, Calibration], evict: Eviction, resident: float, padding: tuple[int, ...]
) -> None:
    """Where every step fetches all, every way to evict takes the oldest, but for the sinks."""
    model, _ = llama
    pieces = cuts(40, *[1] * 8, 5, *[1] * 8)
    ids, mask = left_padded(tokens(3, pieces[-1].stop), padding)
    expected = oldest_dropped(model, ids, mask, pieces, 30, sinks=3)
    with attach(*llama, covering(recent_tokens=4, sink_tokens=3)) as session:
        cache = limited(session, 30, evict, resident=resident)
        actual = fed(model, cache, ids, mask, pieces)
    assert_close(actual[mask.bool()], expected[mask.bool()], **CLOSE)


@pytest.mark.parametrize(
    ("policy", "sinks", "held"),
    [("infinigen", 1, 1), ("infinigen", 0, 0), ("stream", 2, 2), ("infinigen-paper", 2, 0)],
)
@pytest.mark.parametrize("prompt", [20, 40])  # the capacity is 30
def test_sinks_stay_as_the_settings_say(
    llama: tuple[Any, Calibration], policy: str, sinks: int, held: int, prompt: int
) -> None:
    """The paper's policy, as published, has none."""
    model, _ = llama
    ids, mask = left_padded(tokens(3, LENGTH), (0, 11, 3))
    with attach(*llama, selecting(sink_tokens=sinks)) as session:
        cache = limited(session, 30, "fifo", policy=policy)
        run(model, cache, ids, mask, prompt=prompt)
        for layer in cache.offloaded:
            old = [[each for each in row if each < 30] for row in layer.pool.positions.tolist()]
            assert old == [list(range(padding, padding + held)) for padding in (0, 11, 3)]


def test_padding_is_forgotten_with_the_tokens(llama: tuple[Any, Calibration]) -> None:
    model, _ = llama
    ids, mask = left_padded(tokens(3, LENGTH), (0, 11, 3))
    with attach(*llama, selecting()) as session:
        used, fresh = limited(session, 30), limited(session, 30)
        run(model, used, ids, mask, prompt=PROMPT)
        used.crop(-1000)
        plain = tokens(3, LENGTH, seed=5)
        actual, expected = (run(model, each, plain, prompt=PROMPT) for each in (used, fresh))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("evict", EVICTIONS)
@pytest.mark.parametrize("ended", ["crop", "interrupt"])
@pytest.mark.parametrize("padding", [(0, 0), (0, 7)])
def test_what_was_taken_back_evicts_nothing_later(
    llama: tuple[Any, Calibration], evict: Eviction, ended: str, padding: tuple[int, int]
) -> None:
    """Nor does what it fetched: a cropped turn, and a step that failed half way."""
    model, _ = llama
    ids, mask = left_padded(tokens(2, 90), padding)
    other, turn = tokens(2, 90, seed=3), 30
    storage = StorageConfig(capacity=60, evict=evict, resident_layers=(0,))
    with attach(*llama, selecting()) as session:
        used, fresh = (session.new_cache(storage=storage, tokens=60) for _ in range(2))
        for each in (used, fresh):
            fed(model, each, ids, mask, cuts(turn))
        if ended == "crop":
            fed(model, used, other, mask, cuts(turn, 10, *[1] * 15)[1:])
            used.crop(turn)
        else:
            hook = model.model.layers[2].mlp.register_forward_pre_hook(_fail)
            with pytest.raises(KeyboardInterrupt):
                feed(model, used, other, mask, slice(turn, turn + 1))
            hook.remove()
        pieces = cuts(turn, 12, *[1] * 48)[1:]
        actual, expected = (fed(model, each, ids, mask, pieces) for each in (used, fresh))
        held = [
            [layer.pool.positions.sort().values.tolist() for layer in each.offloaded[1:]]
            for each in (used, fresh)
        ]
    assert held[0] == held[1]
    assert_close(actual, expected, **CLOSE)


def _fail(*arguments: Any) -> None:
    raise KeyboardInterrupt


# What a step chooses from.


@pytest.mark.parametrize("padding", [(0, 0), (0, 7)])
@pytest.mark.parametrize("min_context", [1, 26])  # the second row is below it, if padded
@pytest.mark.parametrize("held", [12, 30])
def test_held_candidates(padding: tuple[int, int], min_context: int, held: int) -> None:
    """Against plain loops; positions of 30 tokens, some of them evicted, in any order."""
    settings = {"recent_tokens": 4, "sink_tokens": 2, "max_fetch": 0.5, "min_context": min_context}
    config = covering(**settings)
    start, real = 30, torch.arange(31) >= torch.tensor(padding)[:, None]
    step = Step(
        start=start,
        queries=1,
        rows=2,
        visible=real if any(padding) else None,
        position_ids=torch.tensor([[start], [start - padding[1]]]),
        selecting=True,
        config=config,
    )
    chance = torch.Generator().manual_seed(0)
    positions = torch.stack([torch.randperm(start, generator=chance)[:held] for _ in range(2)])
    candidates = HeldCandidates(step, positions)
    margin = torch.zeros(2, 3, 1, held)
    candidates.mark_kept(margin)
    allowed = candidates.allowed
    bounds = {
        wanted: candidates.bound(torch.full((2, 1), wanted)).tolist() for wanted in (0, 7, 99)
    }
    for row in range(2):
        tokens_before = start - padding[row]
        kept = some = 0
        for slot, position in enumerate(positions[row].tolist()):
            rank = position - padding[row]  # which real token it is
            is_kept = rank >= 0 and (rank < 2 or rank >= tokens_before - 4)
            kept, some = kept + is_kept, some + (rank >= 0)
            assert margin[row, :, 0, slot].eq(float("inf")).all() == is_kept
            assert allowed is None or allowed[row, 0, 0, slot] == (rank >= 0)
        most = max(some // 2, kept)
        for wanted, bound in bounds.items():
            exact = tokens_before < min_context
            assert bound[row] == [some if exact else min(max(wanted, kept), most)]


# One slot map for home, partial keys and resident set.


class Log:
    """All keys that each pool was given, by position."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: dict[int, list[Tensor]] = {}
        append = LinkedPool.append

        def logged(pool: LinkedPool, keys: Tensor, values: Tensor) -> Any:
            self.keys.setdefault(id(pool), []).append(keys.clone())
            return append(pool, keys, values)

        monkeypatch.setattr(LinkedPool, "append", logged)

    def held_by(self, pool: LinkedPool) -> Tensor:
        """Keys of the tokens that a pool says it holds, ``(B, H_kv, S, D)``."""
        keys = torch.cat(self.keys[id(pool)], dim=2)
        positions = pool.positions
        assert positions is not None
        index = positions[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        return keys.gather(2, index)


@pytest.mark.parametrize("evict", EVICTIONS)
@pytest.mark.parametrize("name", ["resident-some", "disk", "disk-resident"])
@pytest.mark.parametrize("capacity", [32, 44])
def test_keys_partial_keys_and_positions_agree(
    fitted: tuple[Any, Calibration],
    evict: Eviction,
    name: str,
    capacity: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model, _ = fitted
    log = Log(monkeypatch)
    ids, mask = left_padded(tokens(3, LENGTH), (0, 9, 3))
    with attach(*fitted, selecting()) as session:
        storage = apart(name, tmp_path, capacity=capacity, evict=evict)
        cache = session.new_cache(storage=storage, tokens=LENGTH)
        feed(model, cache, ids, mask, slice(0, PROMPT))
        for at in range(PROMPT, LENGTH):
            feed(model, cache, ids, mask, slice(at, at + 1))
            for layer in cache.offloaded:
                positions = layer.pool.positions
                if at < capacity:
                    assert positions is None
                    continue
                assert (positions == at).sum(dim=1).tolist() == [1, 1, 1]
                assert (positions == at - 1).any(dim=1).all(), "the newest token was the victim"
                first = torch.tensor([[0], [9], [3]])
                assert (positions == first).any(dim=1).all(), "a sink was the victim"
        for layer in cache.offloaded:
            assert isinstance(layer.pool, LinkedPool)
            held = log.held_by(layer.pool)
            assert torch.equal(layer.pool.all()[0], held)
            policy = layer.policy
            if hasattr(policy, "_partial_keys"):
                expected = policy._partial_keys.projection.partial_keys(held)
                assert_close(policy._partial_keys.view(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("evict", EVICTIONS)
@pytest.mark.parametrize("policy", ["infinigen", "stream"])
def test_home_link_and_resident_set_do_not_show(
    llama: tuple[Any, Calibration], evict: Eviction, policy: str, tmp_path: Path
) -> None:
    model, _ = llama
    ids, mask = left_padded(tokens(3, LENGTH), (0, 9, 3))
    with attach(*llama, selecting()) as session:
        expected = None
        names = "emulated", "resident-small", "resident-some", "resident-all", "disk-resident"
        for name in names:
            storage = apart(name, tmp_path, capacity=32, evict=evict)
            cache = session.new_cache(policy=policy, storage=storage, tokens=LENGTH)
            actual = run(model, cache, ids, mask, prompt=PROMPT)
            expected = actual if expected is None else expected
            assert same(actual, expected), name
            cache.close()


@pytest.mark.parametrize("name", APART)
def test_a_capacity_below_the_ring_of_newest_tokens(
    llama: tuple[Any, Calibration], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The ring may keep no token that the home has dropped."""
    monkeypatch.setattr(linked, "RING", 64)
    model, _ = llama
    pieces = cuts(40, *[1] * 6, 20, 1, 1)
    ids, mask = left_padded(tokens(3, pieces[-1].stop), (0, 11, 3))
    expected = oldest_dropped(model, ids, mask, pieces, 10, sinks=1)
    with attach(*llama, covering()) as session:
        storage = apart(name, tmp_path, capacity=10, evict="fifo")
        actual = fed(model, session.new_cache(storage=storage, tokens=LENGTH), ids, mask, pieces)
    assert_close(actual[mask.bool()], expected[mask.bool()], **CLOSE)


# Rows and turns.


@pytest.mark.parametrize("evict", EVICTIONS)
def test_rows_evict_on_their_own(llama: tuple[Any, Calibration], evict: Eviction) -> None:
    model, _ = llama
    ids = tokens(3, LENGTH)
    with attach(*llama, selecting()) as session:
        together = run(model, limited(session, 32, evict), ids, prompt=PROMPT)
        for row in range(3):
            alone = run(model, limited(session, 32, evict), ids[row : row + 1], prompt=PROMPT)
            assert_close(together[row], alone[0], **CLOSE)


@pytest.mark.parametrize("resident", [0, 0.5])
@pytest.mark.parametrize("min_context", [24, 48])
@pytest.mark.parametrize("evict", EVICTIONS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_padded_row_evicts_as_it_does_alone(
    family: str, evict: Eviction, min_context: int, resident: float
) -> None:
    """Also one that drops only padding when its prompt is read, one of fewer tokens than the pool
    is told will be wanted, and one that is still exact while its neighbours select.
    """
    prompt, length, capacity = 100, 190, 60
    model = tiny.TINY[family](max_position_embeddings=256)
    ids, mask = left_padded(tokens(4, length), (64, 0, 90, 32))
    with attach(model, calibrate_tiny(model), selecting(min_context=min_context)) as session:
        cache = limited(session, capacity, evict, resident=resident)
        together = run(model, cache, ids, mask, prompt=prompt)
        for row, padding in enumerate((64, 0, 90, 32)):
            one = limited(session, capacity, evict, resident=resident)
            alone = run(model, one, ids[row : row + 1, padding:], prompt=prompt - padding)
            assert_close(together[row, padding:], alone[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("evict", EVICTIONS)
def test_rows_are_reordered_after_evictions(
    llama: tuple[Any, Calibration], evict: Eviction
) -> None:
    model, _ = llama
    ids = tokens(3, LENGTH)
    order = torch.tensor([2, 0, 0])
    with attach(*llama, selecting()) as session:
        plain, changed = limited(session, 32, evict), limited(session, 32, evict, resident=0.5)
        for cache in (plain, changed):
            run(model, cache, ids[:, :50], prompt=PROMPT)
        changed.reorder_cache(order)
        steps = range(50, LENGTH)
        expected = torch.cat([feed(model, plain, ids, None, slice(at, at + 1)) for at in steps], 1)
        ids = ids[order]
        actual = torch.cat([feed(model, changed, ids, None, slice(at, at + 1)) for at in steps], 1)
    assert_close(actual, expected[order], **CLOSE)


@pytest.mark.parametrize("evict", EVICTIONS)
def test_generation_beyond_the_capacity(llama: tuple[Any, Calibration], evict: Eviction) -> None:
    model, _ = llama
    ids = tokens(2, PROMPT)
    with attach(*llama, selecting()) as session:
        cache = limited(session, 0.5, evict, resident=0.2)
        first = generate(model, ids, cache, new=8)
        second = torch.cat([ids, first, tokens(2, 9, seed=4)], dim=1)
        assert generate(model, second, cache, new=6).shape == (2, 6)
        assert cache.get_seq_length() == second.shape[1] + 5
        assert all(layer.pool.positions.shape == (2, LENGTH // 2) for layer in cache.offloaded)
        cache.reset()
        assert generate(model, ids, cache, new=8).tolist() == first.tolist()
        beams = generate(model, ids, limited(session, 0.5, evict), new=8, num_beams=3)
        assert beams.shape == (2, 8)


# What cannot be undone.


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("resident_layers", [(), (1,)])
def test_crop_after_eviction_is_refused_and_changes_nothing(
    family: str, resident_layers: tuple[int, ...]
) -> None:
    model = tiny.TINY[family](sliding_window=1000) if family == "gemma2" else tiny.llama()
    ids = tokens(2, 44)
    with attach(model, calibrate_tiny(model), selecting()) as session:
        storage = StorageConfig(capacity=30, evict="fifo", resident_layers=resident_layers)
        cache, straight = (session.new_cache(storage=storage, tokens=LENGTH) for _ in range(2))
        for each in (cache, straight):
            run(model, each, ids[:, :42], prompt=PROMPT)
        for asked in (-3, 20):
            with pytest.raises(CacheStateError, match=r"at the capacity of 30.*set no capacity"):
                cache.crop(asked)
            assert {layer.get_seq_length() for layer in cache.layers} == {42}
        cache.crop(50)
        cache.crop(0)
        steps = range(42, 44)
        actual, expected = (
            torch.cat([feed(model, each, ids, None, slice(at, at + 1)) for at in steps], 1)
            for each in (cache, straight)
        )
        assert torch.equal(actual, expected)
        cache.crop(-1000)
        assert cache.get_seq_length() == 0
        fresh = session.new_cache(storage=storage, tokens=LENGTH)
        actual, expected = (run(model, each, ids, prompt=PROMPT) for each in (cache, fresh))
        assert torch.equal(actual, expected)


def test_assisted_decoding_after_eviction_is_refused(llama: tuple[Any, Calibration]) -> None:
    model, _ = llama
    with attach(*llama, selecting()) as session:
        ids = tokens(1, 20).repeat(1, 2)
        full = limited(session, 30)
        run(model, full, ids[:, :-1], prompt=20)
        # whatever it holds, Transformers' first verifying forward would feed the whole text again
        with pytest.raises(CacheStateError, match="the cache holds 39 tokens"):
            generate(model, ids, full, new=8, prompt_lookup_num_tokens=3)
        with pytest.raises(CacheStateError, match=r"evicted|one token at a time"):
            generate(model, ids, limited(session, 44), new=20, prompt_lookup_num_tokens=3)


def test_several_queries_do_not_select_after_eviction(llama: tuple[Any, Calibration]) -> None:
    """They select by position, which slots are no longer: an error, before anything is lost."""
    model, _ = llama
    ids = tokens(2, 50)
    with attach(*llama, selecting()) as session:
        cache, straight = limited(session, 44), limited(session, 44)
        for each in (cache, straight):
            run(model, each, ids[:, :41], prompt=PROMPT)
            with each.decoding():
                feed(model, each, ids, None, slice(41, 44))  # there is room still
        for at in (44, 45):
            with cache.decoding(), pytest.raises(CacheStateError, match="one token at a time"):
                feed(model, cache, ids, None, slice(at, at + 2))
            assert cache.get_seq_length() == at
            piece = slice(at, at + 1)
            assert torch.equal(*(feed(model, each, ids, None, piece) for each in (cache, straight)))
