"""Rows of a batch: who may join, step and leave, and what happens to the others."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import tiny
from calibrating import calibrate_tiny, selecting, tokens
from infinigen_kv import CacheStateError, Calibration, HomeError, InputError, Session, attach
from infinigen_kv.batching.batch import InfiniGenBatch
from infinigen_kv.batching.row import Row
from infinigen_kv.kernels.reference import TorchKernels
from infinigen_kv.storage.homes.disk import scratch
from infinigen_kv.storage.pools.linked import LinkedPool
from linking import apart, failing, nothing_left, open_files
from rows import lengths_of
from waiting import PATIENCE

PROMPTS = (30, 12, 41)
TOKENS = 64


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def fitted(request: pytest.FixtureRequest) -> tuple[Any, Calibration]:
    model = tiny.TINY[request.param]()
    return model, calibrate_tiny(model)


@pytest.fixture
def session(llama: tuple[Any, Calibration]) -> Iterator[Session]:
    with attach(*llama, selecting()) as made:
        yield made


def joined(batch: InfiniGenBatch, prompts: tuple[int, ...] = PROMPTS) -> list[Row]:
    return [batch.join(tokens(1, length, seed=length)) for length in prompts]


def tensors_of(row: Row) -> dict[str, int]:
    """Addresses of all that a row keeps, by where it was found."""
    found: dict[str, int] = {}
    seen: set[int] = set()

    def look(value: Any, path: str) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            found[path] = value.data_ptr()
        elif isinstance(value, (list, tuple)):
            for number, each in enumerate(value):
                look(each, f"{path}.{number}")
        elif type(value).__module__.startswith(
            ("infinigen_kv.storage.pools", "infinigen_kv.rehearsal")
        ):
            names = getattr(value, "__slots__", None) or vars(value)
            for name in names:
                look(getattr(value, name), f"{path}.{name}")

    for layer in row.cache.offloaded:
        look(layer.pool, f"{layer.spec.index}.pool")
        look(getattr(layer.policy, "_partial_keys", None), f"{layer.spec.index}.partial")
    return found


# Joining and leaving.


def test_places_are_taken_and_given_back(session: Session) -> None:
    with session.new_batch(rows=3, tokens=TOKENS) as batch:
        assert (batch.free, batch.rows) == (3, [])
        rows = joined(batch)
        assert [row.place for row in rows] == [0, 1, 2]
        assert (batch.free, batch.rows) == (0, rows)
        assert lengths_of(rows) == list(PROMPTS)
        batch.release(rows[1])
        assert (batch.free, batch.rows) == (1, [rows[0], rows[2]])
        again = batch.join(tokens(1, 5))
        assert again.place == 1 and batch.rows == [rows[0], again, rows[2]]
    assert (batch.free, batch.rows) == (3, [])
    assert all(row.is_released for row in [*rows, again])


def test_the_three_ways_to_give_tokens(session: Session) -> None:
    with session.new_batch(rows=3, tokens=TOKENS) as batch:
        rows = joined(batch, (20, 20, 20))  # the same prompt: the same logits for the same tokens
        first = batch.step({rows[0]: 5, rows[1]: 6, rows[2]: 7})
        second = batch.step(rows[:2], torch.tensor([5, 6]))
        third = batch.step([rows[2]], [5])
        assert first.shape == (3, tiny.VOCABULARY) and second.shape == (2, tiny.VOCABULARY)
        assert not torch.equal(first[0], first[1])
        assert all(map(torch.equal, (row.logits for row in rows), [*second, *third]))
        assert lengths_of(rows) == [22, 22, 22]


def test_logits_of_the_prompt(session: Session) -> None:
    ids = tokens(1, 25)
    with session.new_batch(rows=3, tokens=TOKENS, policy="ideal") as batch:
        rows = [batch.join(ids), batch.join(ids[0].tolist()), batch.join(ids[0], chunk=7)]
        cache = session.new_cache(policy="ideal")
        expected = session.model(ids, cache=cache).logits[0, -1]
        for row in rows:
            assert_close(row.logits, expected, atol=1e-5, rtol=1e-4)


def test_joining_and_leaving_copy_nothing(session: Session) -> None:
    with session.new_batch(rows=4, tokens=TOKENS) as batch:
        rows = joined(batch)
        batch.step(rows, [3, 4, 5])
        kept = rows[0], rows[2]
        before = [tensors_of(row) for row in kept]
        assert all(len(each) > 8 for each in before)
        batch.release(rows[1])
        joined(batch, (50, 3))
        batch.release(batch.rows[-1])
        assert [tensors_of(row) for row in kept] == before
        batch.step(kept, [3, 4])  # within what was reserved at once
        pools = [{name: at for name, at in each.items() if "_home" in name} for each in before]
        assert [
            {name: at for name, at in tensors_of(row).items() if "_home" in name} for row in kept
        ] == pools


def test_a_released_row_is_freed_at_once(session: Session) -> None:
    with session.new_batch(rows=2, tokens=TOKENS) as batch:
        kept, row = joined(batch, (20, 30))
        batch.step([kept, row], [3, 4])
        alone = kept.cache.device_bytes
        assert batch.device_bytes > alone
        held: list[weakref.ref[Any]] = [weakref.ref(layer.pool) for layer in row.cache.offloaded]
        held.append(weakref.ref(row.cache))
        gc.disable()
        try:
            batch.release(row)
            assert [each() for each in held] == [None] * len(held)
        finally:
            gc.enable()
        assert batch.device_bytes == alone


def test_tokens_of_a_row_are_what_it_reserves(session: Session) -> None:
    with session.new_batch(rows=2, tokens=400, policy="ideal") as batch:
        small, large = batch.join(tokens(1, 20), tokens=300), batch.join(tokens(1, 20))
        assert (small.tokens, large.tokens) == (300, 400)
        layers, heads, entry = 4, 2, 2 * 16 * 4
        assert small.cache.device_bytes == layers * heads * entry * 300
        assert large.cache.device_bytes == layers * heads * entry * 400


def test_rows_share_kernels_and_rehearsal_weights(session: Session) -> None:
    with session.new_batch(rows=2, tokens=TOKENS) as batch:
        first, second = joined(batch, (20, 30))
        for one, other in zip(first.cache.offloaded, second.cache.offloaded, strict=True):
            assert one._kernels is other._kernels
        policies: list[Any] = [row.cache.offloaded[2].policy for row in (first, second)]
        assert policies[0]._layer is policies[1]._layer


# What is refused; nobody else notices.

REFUSED: dict[str, tuple[Callable[[InfiniGenBatch, list[Row]], object], type[Exception], str]] = {
    "full": (lambda batch, rows: batch.join(tokens(1, 5)), CacheStateError, "all 3 rows are taken"),
    "released twice": (
        lambda batch, rows: [batch.release(rows[1]), batch.release(rows[1])],
        CacheStateError,
        "row 1 was released",
    ),
    "step of a released row": (
        lambda batch, rows: [batch.release(rows[1]), batch.step(rows, [3, 4, 5])],
        CacheStateError,
        "row 1 was released",
    ),
    "row twice": (
        lambda batch, rows: batch.step([rows[0], rows[0]], [3, 4]),
        InputError,
        "given twice",
    ),
    "no row": (lambda batch, rows: batch.step({}), InputError, "at least one row"),
    "no tokens": (lambda batch, rows: batch.step(rows), InputError, "3 rows and 0 tokens"),
    "too few tokens": (
        lambda batch, rows: batch.step(rows, [3, 4]),
        InputError,
        "3 rows and 2 tokens",
    ),
    "tokens twice": (
        lambda batch, rows: batch.step({rows[0]: 3}, [3]),
        InputError,
        "tokens are given twice",
    ),
    "unknown token": (
        lambda batch, rows: batch.step(rows, [3, 4, tiny.VOCABULARY]),
        InputError,
        "the model knows 0 to 127",
    ),
    "negative token": (lambda batch, rows: batch.step(rows, [3, -1, 4]), InputError, "from -1"),
    "fractions": (
        lambda batch, rows: batch.step(rows, torch.ones(3)),
        InputError,
        "must be integers",
    ),
    "words": (
        lambda batch, rows: batch.step(rows, cast(Any, ["a", "b", "c"])),
        InputError,
        "must be integers",
    ),
}
REFUSED_JOINS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty": ([], {}, "the prompt is empty"),
    "too long": (tokens(1, TOKENS + 1), {}, "the prompt has 65 tokens, but .* at most 64"),
    "too long for its own": (tokens(1, 20), {"tokens": 19}, "at most 19"),
    "more than the batch": (tokens(1, 20), {"tokens": TOKENS + 1}, "hold at most 64"),
    "no room": (tokens(1, 20), {"tokens": 0}, "tokens=0 is not valid"),
    "two rows": (tokens(2, 20), {}, r"shape \(2, 20\)"),
    "fractions": (torch.ones(1, 5), {}, "must be integers"),
    "unknown token": ([3, 4, 500], {}, "the model knows 0 to 127"),
    "chunk": (tokens(1, 20), {"chunk": 0}, "chunk=0"),
}


@pytest.fixture(scope="module")
def undisturbed(llama: tuple[Any, Calibration]) -> Tensor:
    """Logits of the rows 0 and 2 of `PROMPTS` after two steps that nothing came between."""
    with attach(*llama, selecting()) as session, session.new_batch(rows=3, tokens=TOKENS) as batch:
        rows = joined(batch)
        batch.step(rows, [3, 4, 5])
        return batch.step([rows[0], rows[2]], [6, 7])


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_leaves_the_other_rows_alone(
    session: Session, case: str, undisturbed: Tensor
) -> None:
    attempt, error, words = REFUSED[case]
    with session.new_batch(rows=3, tokens=TOKENS) as batch:
        rows = joined(batch)
        batch.step(rows, [3, 4, 5])
        with pytest.raises(error, match=words):
            attempt(batch, rows)
        assert_close(batch.step([rows[0], rows[2]], [6, 7]), undisturbed, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", REFUSED_JOINS)
def test_a_prompt_that_cannot_join(session: Session, case: str, undisturbed: Tensor) -> None:
    prompt, options, words = REFUSED_JOINS[case]
    with session.new_batch(rows=4, tokens=TOKENS) as batch:
        rows = joined(batch)
        batch.step(rows, [3, 4, 5])
        with pytest.raises(InputError, match=words):
            batch.join(prompt, **options)
        assert batch.free == 1
        assert_close(batch.step([rows[0], rows[2]], [6, 7]), undisturbed, atol=1e-5, rtol=1e-4)


def test_a_full_row_takes_no_more(session: Session) -> None:
    with session.new_batch(rows=2, tokens=TOKENS) as batch:
        full, other = batch.join(tokens(1, 9), tokens=10), batch.join(tokens(1, 9))
        batch.step([full, other], [3, 4])
        with pytest.raises(CacheStateError, match="row 0 holds 10 tokens"):
            batch.step([other, full], [3, 4])
        assert lengths_of([full, other]) == [10, 10]
        batch.step([other], [3])
        assert other.length == 11


def test_rows_of_another_batch(session: Session) -> None:
    with (
        session.new_batch(rows=1, tokens=TOKENS) as one,
        session.new_batch(rows=2, tokens=TOKENS) as other,
    ):
        rows = joined(other, (10, 20))
        joined(one, (10,))
        for row in rows:
            with pytest.raises(CacheStateError, match="another batch"):
                one.step({row: 3})
            with pytest.raises(CacheStateError, match="another batch"):
                one.release(row)
        assert lengths_of(rows) == [10, 20]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": 0}, "rows=0 is not valid: it must be an integer >= 1"),
        ({"rows": True}, "rows=True"),
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": 1.5}, "tokens=1.5"),
        ({"tokens": tiny.MAX_POSITIONS + 1}, "513 tokens .* more than the model's 512"),
        ({"policy": "h20"}, "did you mean h2o"),
        ({"kernels": "c"}, "kernels='c'"),
    ],
)
def test_batches_that_cannot_be_made(session: Session, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        session.new_batch(**{"rows": 2, "tokens": TOKENS, **options})


def test_a_closed_batch(llama: tuple[Any, Calibration]) -> None:
    with attach(*llama, selecting()) as session:
        batch, later = (session.new_batch(rows=2, tokens=TOKENS) for _ in range(2))
        (row,) = joined(batch, (10,))
        (left,) = joined(later, (10,))
        batch.close()
        batch.close()
        for use in (
            lambda: batch.join(tokens(1, 5)),
            lambda: batch.step({row: 3}),
            lambda: batch.release(row),
        ):
            with pytest.raises(CacheStateError, match="this batch is closed"):
                use()
        with pytest.raises(CacheStateError, match="was released"):
            assert row.length
    with pytest.raises(CacheStateError, match="of an attached model"):
        later.step({left: 3})
    with pytest.raises(CacheStateError, match="the session is over"):
        session.new_batch(tokens=TOKENS)
    later.close()


def test_one_thread_at_a_time(llama: tuple[Any, Calibration]) -> None:
    inside, refused = threading.Event(), threading.Event()

    def wait(*seen: Any) -> None:
        inside.set()
        assert refused.wait(PATIENCE)

    with attach(*llama, selecting()) as session, session.new_batch(rows=3, tokens=TOKENS) as batch:
        rows = joined(batch, (10, 20))
        handle = llama[0].model.layers[1].mlp.register_forward_pre_hook(wait)
        with ThreadPoolExecutor(1) as pool:
            step = pool.submit(batch.step, rows, [3, 4])
            assert inside.wait(PATIENCE)
            try:
                for use in (
                    lambda: batch.join(tokens(1, 5)),
                    lambda: batch.step(rows, [3, 4]),
                    lambda: batch.release(rows[0]),
                ):
                    with pytest.raises(CacheStateError, match="another thread"):
                        use()
            finally:
                refused.set()
            assert step.result(PATIENCE).shape == (2, tiny.VOCABULARY)
        handle.remove()
        assert lengths_of(rows) == [11, 21]


# Interrupted halfway.

FAILURES = (RuntimeError("broken"), KeyboardInterrupt())


def places(model: Any) -> dict[str, nn.Module]:
    """Where a forward may fail: before, between and after the layers' attention."""
    decoder = model.get_decoder()
    layers = [layer.mlp for layer in decoder.layers]
    return {
        "embedding": model.get_input_embeddings(),
        "first": layers[0],
        "second": layers[1],
        "last": layers[3],
        "norm": decoder.norm,
        "head": model.lm_head,
    }


PLACES = ("embedding", "first", "second", "last", "norm", "head")


@pytest.mark.parametrize("failure", FAILURES, ids=["error", "interrupt"])
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_fails_leaves_all_rows_as_they_were(
    fitted: tuple[Any, Calibration], failure: BaseException, place: str
) -> None:
    """The windows of sliding layers, longer than which these rows are, go back too."""
    model, _ = fitted
    with attach(*fitted, selecting()) as session, session.new_batch(rows=4, tokens=TOKENS) as batch:
        rows, straight = joined(batch, (30, 12)), joined(batch, (30, 12))
        for each in (rows, straight):
            batch.step(each, [3, 4])
        raising = pytest.raises(type(failure))
        with failing(places(model)[place], failure), raising:
            batch.step(rows, [5, 6])
        for row, length in zip(rows, (31, 13), strict=True):  # before anything else is asked for
            assert {layer.get_seq_length() for layer in row.cache.layers} == {length}
        for given in ([7, 8], [9, 10]):
            assert_close(batch.step(rows, given), batch.step(straight, given), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("failure", FAILURES, ids=["error", "interrupt"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("home", ["emulated", "disk-resident"])
def test_a_join_that_fails_leaves_its_place_free(
    llama: tuple[Any, Calibration],
    failure: BaseException,
    place: str,
    home: str,
    tmp_path: Path,
    undisturbed: Tensor,
) -> None:
    model, _ = llama
    with (
        attach(*llama, selecting(), apart(home, tmp_path)) as session,
        session.new_batch(rows=4, tokens=TOKENS) as batch,
    ):
        rows = joined(batch)
        batch.step(rows, [3, 4, 5])
        raising = pytest.raises(type(failure))
        with failing(places(model)[place], failure, after=1), raising:
            batch.join(tokens(1, 20), chunk=10)  # in its second chunk
        assert batch.free == 1
        reserved = batch.storage.bytes_on_disk
        batch.join(tokens(1, 20), chunk=10)
        if home != "emulated":  # what the failed one had reserved was there for this one
            assert batch.storage.bytes_on_disk == batch.home_bytes == reserved
        assert_close(batch.step([rows[0], rows[2]], [6, 7]), undisturbed, atol=1e-5, rtol=1e-4)


def test_a_row_that_cannot_go_back(llama: tuple[Any, Calibration], tmp_path: Path) -> None:
    """Once tokens are evicted; the others go on."""
    model, _ = llama
    storage = apart("emulated", tmp_path, capacity=20)
    with (
        attach(*llama, selecting(), storage) as session,
        session.new_batch(rows=3, tokens=TOKENS) as batch,
    ):
        short, long, straight = joined(batch, (10, 30, 10))
        with failing(places(model)["last"], RuntimeError("broken")), pytest.raises(RuntimeError):
            batch.step([short, long], [3, 4])
        with pytest.raises(CacheStateError, match="row 1 could not go back"):
            batch.step([short, long], [3, 4])
        assert lengths_of([short, straight]) == [10, 10]
        logits = batch.step([short, straight], [3, 3])
        assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-4)
        batch.release(long)
        batch.step([short, batch.join(tokens(1, 30))], [3, 4])


# Sharing.


def test_all_rows_share_one_link(session: Session, tmp_path: Path) -> None:
    storage = apart("emulated", tmp_path)
    with session.new_batch(rows=3, tokens=TOKENS, storage=storage) as batch:
        rows = joined(batch)
        link = batch.storage.link
        assert all(row.cache.storage.link is link for row in rows)
        assert link.pace is not None
        batch.step(rows, [3, 4, 5])
        link.statistics.reset()
        batch.step(rows, [3, 4, 5])
        written = 3 * 4 * 2 * (2 * 16 * 4)  # rows, layers, heads, entry
        assert link.statistics.bytes_up == written
        assert link.statistics.transfers == 3 * 4


def test_a_resident_set_in_bytes_is_for_all_rows(session: Session, tmp_path: Path) -> None:
    entry, layers, heads, rows = 2 * 16 * 4, 4, 2, 3
    budget = entry * layers * heads * rows * 7
    storage = apart("emulated", tmp_path, resident=budget)
    with session.new_batch(rows=rows, tokens=TOKENS, storage=storage) as batch:
        for row in joined(batch):
            assert {layer.pool.resident_budget for layer in row.cache.offloaded} == {7}


def test_a_row_gives_its_space_on_disk_back(session: Session, tmp_path: Path) -> None:
    storage = apart("disk", tmp_path)
    with nothing_left(tmp_path), session.new_batch(rows=2, tokens=TOKENS, storage=storage) as batch:
        rows = joined(batch, (40, 20))
        reserved = batch.storage.bytes_on_disk
        assert reserved == batch.home_bytes > 0
        for length in (60, 10, 33):
            batch.release(rows[1])
            assert batch.home_bytes == reserved // 2
            (rows[1],) = joined(batch, (length,))
            batch.step(rows, [3, 4])
        assert batch.storage.bytes_on_disk == reserved == batch.home_bytes


@pytest.mark.parametrize("policy", ["infinigen", "paging"])
@pytest.mark.parametrize("ending", ["close", "session", "drop"])
def test_nothing_is_left(
    llama: tuple[Any, Calibration], policy: str, ending: str, tmp_path: Path
) -> None:
    storage = apart("disk", tmp_path)
    with nothing_left(tmp_path), attach(*llama, selecting(), storage) as session:
        batch = session.new_batch(rows=2, tokens=TOKENS, policy=policy)
        rows = joined(batch, (40, 20))
        batch.step(rows, [3, 4])
        assert batch.storage.bytes_on_disk > 0
        if ending == "close":
            batch.close()
        elif ending == "drop":
            del batch, rows
            gc.collect()


def test_rows_outlive_a_batch_that_is_dropped(session: Session, tmp_path: Path) -> None:
    """Whoever still holds a row's cache keeps its file open."""
    storage = apart("disk", tmp_path)
    with nothing_left(tmp_path):
        batch = session.new_batch(rows=2, tokens=TOKENS, storage=storage)
        (row,) = joined(batch, (40,))
        cache = row.cache
        del batch, row
        gc.collect()
        cache.offloaded[1].pool.all()
        del cache
        gc.collect()


def test_a_full_disk_refuses_one_row(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Tensor
) -> None:
    storage = apart("disk", tmp_path)
    with session.new_batch(rows=4, tokens=TOKENS, storage=storage) as batch:
        rows = joined(batch)
        batch.step(rows, [3, 4, 5])

        def full(*given: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(scratch, "lengthen", full)
            with pytest.raises(HomeError, match="No space left"):
                batch.join(tokens(1, 20))
        assert batch.free == 1
        batch.join(tokens(1, 20))
        assert_close(batch.step([rows[0], rows[2]], [6, 7]), undisturbed, atol=1e-5, rtol=1e-4)


def test_open_files_and_threads_stay_as_many(session: Session, tmp_path: Path) -> None:
    storage = apart("disk-resident", tmp_path)
    threads = set(threading.enumerate())
    with nothing_left(tmp_path), session.new_batch(rows=3, tokens=TOKENS, storage=storage) as batch:
        files, seen = open_files(), set()
        for request in range(60):
            if not batch.free:
                batch.release(batch.rows[request % 3])
            batch.join(tokens(1, 5 + request % 30, seed=request))
            batch.step(batch.rows, [3] * len(batch.rows))
            assert open_files() <= files
            # threads start when they are needed: one that writes, and as many as read at once
            assert len(set(threading.enumerate()) - threads) <= 1 + storage.queue_depth
            if request > 20:  # the longest row has been there
                seen.add(batch.storage.bytes_on_disk)
        assert len(seen) == 1


# The kernels.


def test_kernels_can_be_chosen(session: Session, tmp_path: Path) -> None:
    with session.new_batch(rows=1, tokens=TOKENS, kernels="torch") as batch:
        (row,) = joined(batch, (20,))
        assert isinstance(row.cache.offloaded[0]._kernels, TorchKernels)
    with session.new_batch(rows=1, tokens=TOKENS, storage=apart("disk", tmp_path)) as batch:
        (row,) = joined(batch, (20,))
        assert all(isinstance(layer.pool, LinkedPool) for layer in row.cache.offloaded)
