"""Failures midway: the model is restored, the cache goes back or says that it cannot."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tiny
from calibrating import calibrate_tiny, covering, feed, generate, reference, run, selecting, tokens
from infinigen_kv import CacheStateError, CalibrationError, InputError, attach
from infinigen_kv.cache.recorder import FetchRecorder
from waiting import PATIENCE

FAMILIES = ("llama", "gemma2", "opt")
PROMPT = 40
FAILURES = (RuntimeError, KeyboardInterrupt)


@pytest.fixture(scope="module", params=FAMILIES)
def fitted(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    model = tiny.TINY[request.param]()
    return model, calibrate_tiny(model)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


def state_of(model: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"attention": model.config._attn_implementation}
    for name, module in model.named_modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called"):
            state[f"{name}.{kind}"] = list(getattr(module, kind).values())
    return state


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """The model is as before, and no thread is left."""
    before, threads = state_of(model), set(threading.enumerate())
    yield
    assert state_of(model) == before
    assert set(threading.enumerate()) <= threads  # some that a forgotten cache had may end


@contextmanager
def failing(module: nn.Module, failure: type[BaseException], *, after: int = 0) -> Iterator[None]:
    """The module's forward raises at its call number ``after``."""
    calls = iter(range(after + 1))

    def fail(*seen: Any) -> None:
        if next(calls, None) == after:
            raise failure

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def mlps(model: Any) -> list[nn.Module]:
    """One module after the attention of each layer."""
    layers = model.get_decoder().layers
    return [layer.fc1 if hasattr(layer, "fc1") else layer.mlp for layer in layers]


# Inside a forward.


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_interrupted_prefill(
    fitted: tuple[Any, Any], failure: type[BaseException], layer: int
) -> None:
    model, _ = fitted
    ids = tokens(2, PROMPT + 4)
    expected = reference(model, ids, prompt=PROMPT)
    with unchanged(model), attach(*fitted, covering()) as session:
        cache = session.new_cache()
        with failing(mlps(model)[layer], failure), pytest.raises(failure):
            feed(model, cache, ids, None, slice(0, PROMPT))
        assert cache.get_seq_length() == 0
        assert_close(run(model, cache, ids, prompt=PROMPT), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("step", ["decode", "chunk"])
def test_interrupted_step_is_taken_back(
    fitted: tuple[Any, Any], failure: type[BaseException], layer: int, step: str
) -> None:
    model, _ = fitted
    ids = tokens(2, PROMPT + 8)
    length = {"decode": 1, "chunk": 5}[step]
    piece = slice(PROMPT + 2, PROMPT + 2 + length)
    with unchanged(model), attach(*fitted, selecting()) as session:
        cache, straight = session.new_cache(), session.new_cache()
        for each in (cache, straight):
            run(model, each, ids[:, : PROMPT + 2], prompt=PROMPT)
        with failing(mlps(model)[layer], failure), pytest.raises(failure):
            feed(model, cache, ids, None, piece)
        sliding = len(cache.offloaded) < len(cache.layers)
        if sliding:
            with pytest.raises(CacheStateError, match=r"reset\(\)"):
                feed(model, cache, ids, None, piece)
            cache.reset()
            run(model, cache, ids[:, : PROMPT + 2], prompt=PROMPT)
        assert cache.get_seq_length() == PROMPT + 2
        actual, expected = (feed(model, each, ids, None, piece) for each in (cache, straight))
    assert {layer.get_seq_length() for layer in cache.layers} == {piece.stop}
    assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("failure", FAILURES)
def test_failure_after_the_last_attention_is_taken_back_too(
    llama: tuple[Any, Any], failure: type[BaseException]
) -> None:
    model, _ = llama
    ids = tokens(1, PROMPT + 1)
    with attach(*llama, selecting()) as session:
        cache = session.new_cache()
        feed(model, cache, ids, None, slice(0, PROMPT))
        with failing(model.model.norm, failure), pytest.raises(failure):
            feed(model, cache, ids, None, slice(PROMPT, PROMPT + 1))
        assert cache.get_seq_length() == PROMPT


def test_failure_before_any_layer_costs_nothing(fitted: tuple[Any, Any]) -> None:
    model, _ = fitted
    ids = tokens(2, PROMPT + 1)
    with attach(*fitted, covering()) as session:
        cache = session.new_cache()
        feed(model, cache, ids, None, slice(0, PROMPT))
        with failing(model.get_input_embeddings(), RuntimeError), pytest.raises(RuntimeError):
            feed(model, cache, ids, None, slice(PROMPT, PROMPT + 1))
        actual = feed(model, cache, ids, None, slice(PROMPT, PROMPT + 1))
    expected = reference(model, ids, prompt=PROMPT)[:, -1:]
    assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("operation", ["crop", "reset", "reorder_cache", "batch_repeat_interleave"])
def test_cache_operations_after_an_interrupt(llama: tuple[Any, Any], operation: str) -> None:
    model, _ = llama
    arguments = {
        "crop": (-5,),
        "reset": (),
        "reorder_cache": (torch.tensor([1, 0]),),
        "batch_repeat_interleave": (2,),
    }[operation]
    ids = tokens(2, PROMPT + 1)
    with attach(*llama, selecting()) as session:
        cache, straight = session.new_cache(), session.new_cache()
        for each in (cache, straight):
            feed(model, each, ids, None, slice(0, PROMPT))
        with failing(mlps(model)[2], KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            feed(model, cache, ids, None, slice(PROMPT, PROMPT + 1))
        for each in (cache, straight):
            getattr(each, operation)(*arguments)
        lengths = {layer.get_seq_length() for layer in cache.layers}
        assert lengths == {straight.get_seq_length()}
        rows = straight.offloaded[0].rows or 2
        piece = tokens(rows, 1, seed=4)
        actual, expected = (model(piece, cache=each).logits for each in (cache, straight))
    assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_interrupt_leaves_the_cache_unusable_after_detach(llama: tuple[Any, Any]) -> None:
    model, _ = llama
    ids = tokens(1, PROMPT + 1)
    caches = []
    with unchanged(model), suppress(KeyboardInterrupt), attach(*llama) as session:
        caches.append(session.new_cache(policy="ideal"))
        with failing(mlps(model)[2], KeyboardInterrupt):
            feed(model, caches[0], ids, None, slice(0, PROMPT))
    cache = caches[0]
    with pytest.raises(CacheStateError, match="session"):
        feed(model, cache, ids, None, slice(0, PROMPT))


# Inside generate.


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("where", ["streamer", "processor", "forward"])
def test_interrupted_generation(
    llama: tuple[Any, Any], failure: type[BaseException], where: str
) -> None:
    model, _ = llama
    ids = tokens(1, PROMPT)
    with unchanged(model), attach(*llama, selecting()) as session:
        expected = generate(model, ids, session.new_cache(), new=10)
        cache = session.new_cache()
        options, broken = _break(where, failure)
        with (
            failing(mlps(model)[2], failure, after=3 if broken else 10_000),
            pytest.raises(failure),
        ):
            generate(model, ids, cache, new=10, **options)
        done = cache.get_seq_length() - PROMPT + 1  # the last generated token is not cached
        assert done == 3
        so_far = torch.cat([ids, expected[:, :done]], 1)
        again = generate(model, so_far, cache, new=10 - done)
    assert again.tolist() == expected[:, done:].tolist()


def _break(where: str, failure: type[BaseException]) -> tuple[dict[str, Any], bool]:
    """Options of `generate` that fail after three tokens, and whether the forward must."""
    calls = iter(range(100))

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            if next(calls) == 3:
                raise failure

        def end(self) -> None: ...

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if next(calls) == 3 - 1:
            raise failure
        return scores

    faults: dict[str, tuple[dict[str, Any], bool]] = {
        "streamer": ({"streamer": Streamer()}, False),
        "processor": ({"logits_processor": [process]}, False),
        "forward": ({}, True),
    }
    return faults[where]


# Attaching.


@pytest.mark.parametrize("kind", ["register_forward_pre_hook", "register_forward_hook"])
@pytest.mark.parametrize("call", range(8))
def test_attach_raises_midway(
    llama: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, kind: str, call: int
) -> None:
    model, _ = llama
    calls = iter(range(100))
    original = getattr(nn.Module, kind)

    def register(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise MemoryError
        return original(self, *args, **kwargs)

    with unchanged(model):
        monkeypatch.setattr(nn.Module, kind, register)
        try:
            with attach(*llama, selecting()):
                pass
        except MemoryError:
            raised = True
        else:
            raised = False
        monkeypatch.undo()
    assert raised == (call < {"register_forward_pre_hook": 7, "register_forward_hook": 2}[kind])


def test_set_attention_raises_midway(
    llama: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = llama
    original = model.set_attn_implementation
    calls: list[str] = []

    def interrupted(name: str) -> None:
        original(name)
        calls.append(name)
        if len(calls) == 1:
            raise KeyboardInterrupt

    with unchanged(model):
        monkeypatch.setattr(model, "set_attn_implementation", interrupted)
        with pytest.raises(KeyboardInterrupt), attach(*llama, selecting()):
            pass
        monkeypatch.undo()


def test_nested_attach_is_refused(llama: tuple[Any, Any]) -> None:
    model, _ = llama
    ids = tokens(1, PROMPT + 2)
    with unchanged(model), attach(*llama, selecting()) as session:
        with pytest.raises(CacheStateError, match="attached already"), attach(*llama):
            pass
        run(model, session.new_cache(), ids, prompt=PROMPT)  # the outer one still works


def test_attach_with_the_calibration_of_another_model(llama: tuple[Any, Any]) -> None:
    model, _ = llama
    other = tiny.llama()
    tiny.randomise(other, seed=2)
    calibration = calibrate_tiny(other)
    refused = pytest.raises(CalibrationError, match="another model")
    with unchanged(model), refused, attach(model, calibration):
        pass


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"policy": "h20"}, "did you mean h2o.*infinigen, infinigen-paper, stream"),
        ({"tokens": -1}, "tokens=-1"),
        ({}, "without a calibration"),
    ],
)
def test_caches_that_cannot_be_made(
    llama: tuple[Any, Any], arguments: dict[str, Any], fault: str
) -> None:
    with attach(llama[0]) as session, pytest.raises(InputError, match=fault):
        session.new_cache(**arguments)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementation_comes_back(implementation: str) -> None:
    model = tiny.llama()
    model.set_attn_implementation(implementation)
    with unchanged(model), attach(model):
        pass
    assert model.config._attn_implementation == implementation


def test_nothing_keeps_the_cache_alive(llama: tuple[Any, Any]) -> None:
    model, _ = llama
    with attach(*llama, selecting()) as session:
        cache = session.new_cache()
        run(model, cache, tokens(1, PROMPT + 2), prompt=PROMPT)
        held = [weakref.ref(each) for each in (cache, cache.offloaded[1].pool)]
        del cache
        gc.collect()
        assert [each() for each in held] == [None, None]


# Threads.


def test_two_threads_on_one_model(fitted: tuple[Any, Any]) -> None:
    model, _ = fitted
    prompts = [tokens(1, PROMPT), tokens(2, PROMPT + 5, seed=1)]
    with attach(*fitted, selecting()) as session:

        def work(ids: torch.Tensor) -> Any:
            return generate(model, ids, session.new_cache(), new=20).tolist()

        expected = [work(ids) for ids in prompts]
        with ThreadPoolExecutor(2) as pool:
            for _ in range(3):
                assert list(pool.map(work, prompts)) == expected


def test_one_cache_in_two_threads_is_refused(llama: tuple[Any, Any]) -> None:
    """The first thread's forward goes on undisturbed."""
    model, _ = llama
    ids = tokens(1, PROMPT)
    inside, refused = threading.Event(), threading.Event()

    def wait(*seen: Any) -> None:
        inside.set()
        assert refused.wait(PATIENCE)

    with attach(*llama, selecting()) as session:
        cache = session.new_cache()
        handle = mlps(model)[1].register_forward_pre_hook(wait)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(feed, model, cache, ids, None, slice(0, PROMPT))
            assert inside.wait(PATIENCE)
            try:
                with pytest.raises(CacheStateError, match="in the middle of another forward"):
                    feed(model, cache, ids, None, slice(0, PROMPT))
            finally:
                refused.set()
            logits = first.result()
        handle.remove()
    assert_close(logits, reference(model, ids, prompt=PROMPT), atol=1e-4, rtol=1e-4)
    assert cache.get_seq_length() == PROMPT


def test_interrupted_thread_leaves_a_usable_cache(llama: tuple[Any, Any]) -> None:
    """The thread that was interrupted is gone; its forward cannot be under way any more."""
    model, _ = llama
    ids = tokens(1, PROMPT + 1)
    with attach(*llama, selecting()) as session:
        cache = session.new_cache()
        feed(model, cache, ids, None, slice(0, PROMPT))
        with ThreadPoolExecutor(1) as pool, failing(mlps(model)[1], KeyboardInterrupt):
            job = pool.submit(feed, model, cache, ids, None, slice(PROMPT, PROMPT + 1))
            assert isinstance(job.exception(), KeyboardInterrupt)
        cache.recorder = FetchRecorder()
        feed(model, cache, ids, None, slice(PROMPT, PROMPT + 1))
        assert cache.get_seq_length() == PROMPT + 1
    assert cache.recorder.fetched_share(first_layer=1) < 0.5
