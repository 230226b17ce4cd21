"""Caches with a home apart from the device when something fails: clear errors, nothing left."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from calibrating import calibrate_tiny, feed, generate, run, selecting, tokens
from infinigen_kv import CacheStateError, Calibration, InputError, Session, attach
from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.errors import HomeError
from infinigen_kv.storage.homes.buffer import TokenBuffer
from infinigen_kv.storage.homes.disk import scratch
from infinigen_kv.storage.pools import linked
from infinigen_kv.storage.pools.linked import LinkedPool
from linking import apart, failing, model_unchanged, nothing_left

PROMPT, LENGTH = 40, 52
HOMES = ("emulated", "resident-some", "disk", "disk-resident")


@pytest.fixture(autouse=True)
def short_ring_and_cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that steps have entries of the prompt to wait for."""
    monkeypatch.setattr(linked, "RING", 4)
    monkeypatch.setattr(LinkedPool, "fill_resident", lambda pool, *entries: None)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


@pytest.fixture(autouse=True)
def clean(llama: tuple[Any, Calibration], tmp_path: Path) -> Iterator[None]:
    """After every test the model is as before, and no thread and no file is left."""
    with nothing_left(tmp_path), model_unchanged(llama[0]):
        yield


# Failures inside a forward.


@pytest.mark.parametrize("name", HOMES)
@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_failed_forward_is_taken_back(
    llama: tuple[Any, Calibration],
    name: str,
    failure: type[BaseException],
    layer: int,
    tmp_path: Path,
) -> None:
    """In the prompt, a turn and a step; entries of the next layer are on their way then."""
    model, _ = llama
    ids = tokens(2, LENGTH)
    mlp = model.model.layers[layer].mlp
    with attach(*llama, selecting()) as session:
        storage = apart(name, tmp_path)
        cache, straight = (session.new_cache(storage=storage, tokens=LENGTH) for _ in range(2))
        start = 0
        for length in (PROMPT, 1, 1, 1, 4):
            piece = slice(start, start + length)
            with failing(mlp, failure()), pytest.raises(failure):
                feed(model, cache, ids, None, piece)
            assert cache.get_seq_length() == start
            actual, expected = (feed(model, each, ids, None, piece) for each in (cache, straight))
            assert torch.equal(actual, expected)
            start += length


@pytest.mark.parametrize("name", HOMES)
@pytest.mark.parametrize("evict", ["fifo", "lru", "counter"])
def test_a_failed_forward_that_evicts(
    llama: tuple[Any, Calibration], name: str, evict: str, tmp_path: Path
) -> None:
    model, _ = llama
    ids = tokens(2, LENGTH)
    layers = model.model.layers
    with attach(*llama, selecting()) as session:
        storage = apart(name, tmp_path, capacity=32, evict=evict)
        cache, straight = (session.new_cache(storage=storage, tokens=LENGTH) for _ in range(2))
        with failing(layers[1].mlp, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            feed(model, cache, ids, None, slice(0, PROMPT))  # evicts, but nothing was there
        expected = run(model, straight, ids[:, : PROMPT + 2], prompt=PROMPT)
        assert torch.equal(run(model, cache, ids[:, : PROMPT + 2], prompt=PROMPT), expected)
        step = slice(PROMPT + 2, PROMPT + 3)
        for each in (layers[0].input_layernorm, layers[0].self_attn.o_proj, layers[2].mlp):
            with failing(each, RuntimeError("broken")), pytest.raises(RuntimeError, match="broken"):
                feed(model, cache, ids, None, step)
            if each is layers[0].input_layernorm:  # nothing is lost yet
                actual, expected = (feed(model, c, ids, None, step) for c in (cache, straight))
                assert torch.equal(actual, expected)
                continue
            with pytest.raises(CacheStateError, match=r"cannot go back: call reset\(\)"):
                feed(model, cache, ids, None, step)
            cache.reset()
            again = session.new_cache(storage=storage, tokens=LENGTH)
            actual, expected = (run(model, c, ids, prompt=PROMPT) for c in (cache, again))
            assert torch.equal(actual, expected)


def test_interrupted_generation_on_disk(llama: tuple[Any, Calibration], tmp_path: Path) -> None:
    model, _ = llama
    ids = tokens(1, PROMPT)
    with attach(*llama, selecting()) as session:
        storage = apart("disk-resident", tmp_path)
        expected = generate(model, ids, session.new_cache(storage=storage, tokens=LENGTH), new=8)
        cache = session.new_cache(storage=storage, tokens=LENGTH)
        mlp = model.model.layers[2].mlp
        with failing(mlp, KeyboardInterrupt(), after=4), pytest.raises(KeyboardInterrupt):
            generate(model, ids, cache, new=8)
        done = cache.get_seq_length() - PROMPT + 1
        so_far = torch.cat([ids, expected[:, :done]], dim=1)
        assert generate(model, so_far, cache, new=8 - done).tolist() == expected[:, done:].tolist()


# Failures of the disk.


def go_on(model: Any, cache: InfiniGenCache, ids: Tensor, start: int) -> None:
    """Token by token to the end of ``ids``."""
    for at in range(start, ids.shape[1]):
        feed(model, cache, ids, None, slice(at, at + 1))


@contextmanager
def disk_fails(
    monkeypatch: pytest.MonkeyPatch, call: str, number: int, *, after: int = 0, times: int = 1
) -> Iterator[list[int]]:
    """``os.<call>`` fails ``times`` times with the error ``number``; yields its failures so far."""
    original = getattr(os, call)
    calls, failures = iter(range(10**9)), [0]

    def broken(*given: Any) -> Any:
        if after <= next(calls) < after + times:
            failures[0] += 1
            raise OSError(number, os.strerror(number))
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, broken)
        yield failures


@pytest.mark.parametrize("name", ["disk", "disk-resident"])
@pytest.mark.parametrize("policy", ["infinigen", "stream"])
@pytest.mark.parametrize("after", [0, 3, 8])
def test_a_failed_read_costs_one_step(
    llama: tuple[Any, Calibration],
    name: str,
    policy: str,
    after: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model, _ = llama
    ids = tokens(2, LENGTH)
    with attach(*llama, selecting()) as session:
        storage = apart(name, tmp_path)
        cache, straight = (
            session.new_cache(policy=policy, storage=storage, tokens=LENGTH) for _ in range(2)
        )
        expected = run(model, straight, ids, prompt=PROMPT)
        straight.close()
        run(model, cache, ids[:, : PROMPT + 1], prompt=PROMPT)
        with disk_fails(monkeypatch, "preadv", errno.EIO, after=after, times=10**6) as failures:
            with pytest.raises(HomeError, match=r"cannot read .*Input/output error.*home_dir"):
                go_on(model, cache, ids, PROMPT + 1)
            assert failures[0]
        start = cache.get_seq_length()
        assert PROMPT < start < LENGTH - 1
        for at in range(start, LENGTH):
            assert torch.equal(
                feed(model, cache, ids, None, slice(at, at + 1)), expected[:, at : at + 1]
            )


def test_a_short_read_is_an_error(
    llama: tuple[Any, Calibration], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, _ = llama
    ids = tokens(1, LENGTH)
    with attach(*llama, selecting()) as session:
        cache = session.new_cache(storage=apart("disk", tmp_path), tokens=LENGTH)
        feed(model, cache, ids, None, slice(0, PROMPT))
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", lambda *given: 100)
            with pytest.raises(HomeError, match="returned 100 bytes of"):
                feed(model, cache, ids, None, slice(PROMPT, PROMPT + 1))
        assert cache.get_seq_length() == PROMPT


@pytest.mark.parametrize("tokens_known", [0, LENGTH])
@pytest.mark.parametrize("store", [0, 2])
def test_no_room_for_the_prompt(
    llama: tuple[Any, Calibration],
    tokens_known: int,
    store: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Nothing was written yet, so once there is room the same cache takes the prompt."""
    model, _ = llama
    ids = tokens(2, LENGTH)
    lengthen, calls = scratch.lengthen, iter(range(100))

    def full(*given: Any) -> None:
        if next(calls) == store:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        lengthen(*given)

    with attach(*llama, selecting()) as session:
        storage = apart("disk", tmp_path)
        cache, straight = (
            session.new_cache(storage=storage, tokens=tokens_known) for _ in range(2)
        )
        with monkeypatch.context() as patch:
            patch.setattr(scratch, "lengthen", full)
            with pytest.raises(HomeError, match=r"No space left.*shorter prompt.*home_dir"):
                feed(model, cache, ids, None, slice(0, PROMPT))
        assert cache.get_seq_length() == 0
        actual, expected = (run(model, each, ids, prompt=PROMPT) for each in (cache, straight))
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_failed_write_ends_the_cache(
    llama: tuple[Any, Calibration], after: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Behind the computation, so the error comes at a later call; it says so until a new cache."""
    model, _ = llama
    ids = tokens(2, LENGTH)
    with attach(*llama, selecting()) as session:
        storage = apart("disk", tmp_path)
        cache = session.new_cache(storage=storage, tokens=LENGTH)
        with (
            disk_fails(monkeypatch, "pwritev", errno.ENOSPC, after=after) as failures,
            pytest.raises(HomeError, match="No space left"),
        ):
            run(model, cache, ids, prompt=PROMPT)
        assert failures == [1]
        for _ in range(2):
            start = cache.get_seq_length()
            with pytest.raises((HomeError, CacheStateError), match=r"No space left|reset\(\)"):
                feed(model, cache, ids, None, slice(start, start + 1))
        cache.reset()
        with pytest.raises(HomeError, match="No space left"):
            feed(model, cache, ids, None, slice(0, PROMPT))
        cache.close()
        fresh = session.new_cache(storage=storage, tokens=LENGTH)
        assert run(model, fresh, ids, prompt=PROMPT).isfinite().all()


# Case P: the host's memory.


@pytest.mark.parametrize("after", [0, 2, 5])
@pytest.mark.parametrize("capacity", [None, 32])
def test_no_memory_for_the_prompt(
    llama: tuple[Any, Calibration],
    after: int,
    capacity: int | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The error of the allocator comes through, and the cache takes a prompt that fits."""
    model, _ = llama
    ids = tokens(2, LENGTH)
    calls = iter(range(10**6))

    def refusing(method: Callable[..., Any]) -> Callable[..., Any]:
        def refused(*args: Any) -> Any:
            if next(calls) == after:
                raise MemoryError
            return method(*args)

        return refused

    with attach(*llama, selecting()) as session:
        storage = apart("resident-some", tmp_path, capacity=capacity)
        cache, straight = (session.new_cache(storage=storage) for _ in range(2))
        with monkeypatch.context() as patch:
            for name in ("extend", "write"):
                patch.setattr(TokenBuffer, name, refusing(getattr(TokenBuffer, name)))
            with pytest.raises(MemoryError):
                run(model, cache, ids, prompt=PROMPT)
        cache.reset()
        actual, expected = (run(model, each, ids, prompt=PROMPT) for each in (cache, straight))
        assert torch.equal(actual, expected)


# Nothing is left.


def filled(session: Session, name: str, folder: Path, ids: Tensor) -> InfiniGenCache:
    """A cache that has taken a prompt and some steps."""
    depth = {"queue_depth": 3} if name.startswith("disk") else {}
    cache = session.new_cache(storage=apart(name, folder, **depth), tokens=LENGTH)
    run(session.model, cache, ids, prompt=PROMPT)
    return cache


@pytest.mark.parametrize("name", ["emulated", "disk-resident"])
def test_close_releases_threads_and_files(
    llama: tuple[Any, Calibration], name: str, tmp_path: Path
) -> None:
    ids = tokens(1, LENGTH)
    with attach(*llama, selecting()) as session:
        with nothing_left(tmp_path):
            cache = filled(session, name, tmp_path, ids)
            cache.close()
            cache.close()
            assert (cache.get_seq_length(), cache.home_bytes, cache.device_bytes) == (0, 0, 0)
        if name != "emulated":
            with pytest.raises(HomeError, match="closed: open a new one"):
                feed(session.model, cache, ids, None, slice(0, PROMPT))


def test_a_dropped_cache_releases_threads_and_files(
    llama: tuple[Any, Calibration], tmp_path: Path
) -> None:
    ids = tokens(1, LENGTH)
    with attach(*llama, selecting()) as session, nothing_left(tmp_path):
        assert filled(session, "disk", tmp_path, ids).storage.direct_io in (True, False)
        gc.collect()


@pytest.mark.parametrize("failure", [None, RuntimeError, KeyboardInterrupt])
def test_the_end_of_the_session_releases_threads_and_files(
    llama: tuple[Any, Calibration], failure: type[BaseException] | None, tmp_path: Path
) -> None:
    model, _ = llama
    ids = tokens(1, LENGTH)
    kept: list[InfiniGenCache] = []
    expected: Any = nullcontext() if failure is None else pytest.raises(failure)
    with nothing_left(tmp_path), expected, attach(*llama, selecting()) as session:
        kept += [filled(session, name, tmp_path, ids) for name in ("disk", "disk-resident")]
        kept.append(session.new_cache(storage=apart("disk", tmp_path)))
        if failure is not None:
            with failing(model.model.layers[1].mlp, failure()):
                feed(model, kept[0], ids, None, slice(0, 1))
    assert len(kept) == 3
    for cache in kept:
        with pytest.raises(CacheStateError, match="session"):
            feed(model, cache, ids, None, slice(0, 1))
        cache.close()


def test_a_cache_that_cannot_be_closed_does_not_keep_the_model(
    llama: tuple[Any, Calibration], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The hooks go, the other caches are closed, and the error is not swallowed."""
    with ExitStack() as stack:
        session = stack.enter_context(attach(*llama, selecting()))
        caches = [session.new_cache(storage=apart("disk", tmp_path)) for _ in range(3)]
        close = caches[1].storage.close

        def stuck() -> None:
            close()
            raise OSError("stuck")

        monkeypatch.setattr(caches[1].storage, "close", stuck)
        with pytest.raises(OSError, match="stuck"):
            stack.close()


# Before any work.


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written_to(
    llama: tuple[Any, Calibration], number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*given: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(scratch, "create", refused)
    with attach(*llama, selecting()) as session, pytest.raises(InputError, match="home_dir="):
        session.new_cache(storage=apart("disk", tmp_path))


def test_a_read_only_folder(llama: tuple[Any, Calibration], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    # root may write everywhere, but for file systems that let nobody
    folder = Path("/sys") if os.geteuid() == 0 else tmp_path
    with attach(*llama, selecting()) as session, pytest.raises(InputError, match="home_dir="):
        session.new_cache(storage=apart("disk", folder))
    tmp_path.chmod(0o700)


def test_a_missing_folder(llama: tuple[Any, Calibration], tmp_path: Path) -> None:
    missing = tmp_path / "not here"
    with attach(*llama, selecting()) as session:
        with pytest.raises(InputError, match="not here") as error:
            session.new_cache(storage=apart("disk", missing))
        assert "home_dir" in str(error.value)
        with pytest.raises(InputError, match="home_dir"):
            session.new_cache(storage=apart("disk", Path(__file__)))
