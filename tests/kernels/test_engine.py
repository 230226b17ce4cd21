"""A broken model, gradients, inference mode and threads, with the kernels inside the engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tiny
from both_kernels import both_kernels  # noqa: F401
from calibrating import calibrate_tiny, feed, left_padded, run, selecting, tokens
from infinigen_kv import Calibration, InfiniGenError, Session, attach
from infinigen_kv.attention.entries import Entries
from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.kernels.native.kernels import NativeKernels
from linking import apart
from waiting import PATIENCE

PROMPT, LENGTH = 40, 44
STORAGE: dict[str, dict[str, Any] | None] = {
    "local": None,
    "emulated": {"codec": "int8"},
    "resident-some": {},
}


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def fitted(request: pytest.FixtureRequest) -> tuple[Any, Calibration]:
    model = tiny.TINY[request.param]()
    return model, calibrate_tiny(model)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


def new_cache(session: Session, storage: str, folder: Path) -> InfiniGenCache:
    changes = STORAGE[storage]
    where = None if changes is None else apart(storage, folder, **changes)
    return session.new_cache(storage=where, tokens=LENGTH)


# Scores that are no numbers.


@contextmanager
def breaking(cache: InfiniGenCache, number: float) -> Iterator[None]:
    """The last layer's prediction is broken, once others have moved their entries."""
    policy: Any = cache.offloaded[-1].policy
    layer, whole = policy._layer, policy._layer.predict_query

    def predict(hidden: Tensor, step: Any) -> Tensor:
        query = whole(hidden, step).clone()
        query[-1, -1, 0, 0] = number
        return query

    object.__setattr__(layer, "predict_query", predict)
    try:
        yield
    finally:
        object.__setattr__(layer, "predict_query", whole)


@pytest.mark.parametrize("storage", ["local", "resident-some"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_broken_prediction_is_reported_and_forgotten(
    fitted: tuple[Any, Calibration], number: float, storage: str, tmp_path: Path
) -> None:
    """The step leaves nothing behind, where it can be taken back and else once that is reset."""
    model, _ = fitted
    ids, mask = left_padded(tokens(2, LENGTH), (0, 9))
    with attach(*fitted, selecting()) as session:
        cache = new_cache(session, storage, tmp_path)
        expected = run(model, cache, ids, mask, prompt=PROMPT)
        cache.reset()
        run(model, cache, ids[:, : LENGTH - 2], mask, prompt=PROMPT)
        with breaking(cache, number), pytest.raises(InfiniGenError, match="NaN or infinity"):
            feed(model, cache, ids, mask, slice(LENGTH - 2, LENGTH - 1))
        if not any(layer.is_sliding for layer in cache.layers):
            assert cache.get_seq_length() == LENGTH - 2
            steps = range(LENGTH - 2, LENGTH)
            after = [feed(model, cache, ids, mask, slice(at, at + 1)) for at in steps]
            assert_close(torch.cat(after, 1), expected[:, LENGTH - 2 :], atol=1e-5, rtol=1e-5)
        cache.reset()
        again = run(model, cache, ids, mask, prompt=PROMPT)
        assert torch.equal(again, expected)


# Gradients, and inference mode.


def modes(which: str) -> tuple[Any, Any]:
    """For the prompt and for the steps."""
    plain = {"no grad": torch.no_grad, "inference": torch.inference_mode, "grad": nullcontext}
    return tuple(plain[name] for name in which.split(", "))  # type: ignore[return-value]


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize(
    "which",
    ["inference, no grad", "no grad, inference", "grad, grad"],
)
def test_prompt_and_steps_in_other_modes(
    llama: tuple[Any, Calibration], which: str, storage: str, tmp_path: Path
) -> None:
    model, _ = llama
    ids = tokens(2, LENGTH)
    of_prompt, of_steps = modes(which)
    assert any(each.requires_grad for each in model.parameters())
    with attach(*llama, selecting()) as session:
        expected = run(model, new_cache(session, storage, tmp_path), ids, prompt=PROMPT)
        cache = new_cache(session, storage, tmp_path)
        with of_prompt():
            model(ids[:, :PROMPT], cache=cache)
        logits = []
        for at in range(PROMPT, LENGTH):
            with of_steps():
                logits.append(model(ids[:, at : at + 1], cache=cache).logits.detach())
    assert_close(torch.cat(logits, 1), expected[:, PROMPT:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("storage", STORAGE)
def test_copies_made_in_inference_mode_are_used_outside(
    llama: tuple[Any, Calibration], storage: str, tmp_path: Path
) -> None:
    model, _ = llama
    ids, start = tokens(2, LENGTH), LENGTH - 2
    with attach(*llama, selecting()) as session:
        expected = run(model, new_cache(session, storage, tmp_path), ids, prompt=PROMPT)
        cache = new_cache(session, storage, tmp_path)
        run(model, cache, ids[:, :start], prompt=PROMPT)
        with torch.inference_mode():
            copy, swapped = deepcopy(cache), deepcopy(cache)
            swapped.reorder_cache(torch.tensor([1, 0]))
        for at in range(start, LENGTH):
            step, wanted = slice(at, at + 1), expected[:, at : at + 1]
            assert_close(feed(model, copy, ids, None, step), wanted, atol=1e-5, rtol=1e-5)
            rows = feed(model, swapped, ids[[1, 0]], None, step)
            assert_close(rows[[1, 0]], wanted, atol=1e-5, rtol=1e-5)


# Threads.


def test_two_kernels_compute_at_the_same_time() -> None:
    """Compiled code runs without Python's lock."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    problems = [
        (random(1, 4, 1, 32), random(1, 2, 3000, 32), random(1, 2, 3000, 32)) for _ in range(2)
    ]
    start = Barrier(2)

    def work(problem: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        query, keys, values = problem
        kernels = NativeKernels()
        start.wait(PATIENCE)
        return [
            kernels.attend(
                query,
                Entries(keys, values, None),
                None,
                keys[:, :, :1],
                values[:, :, :1],
                scaling=0.2,
                softcap=None,
            )[0]
            for _ in range(50)
        ]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, problems))
    for (query, keys, values), outputs in zip(problems, found, strict=True):
        keys, values = (torch.cat([each, each[:, :, :1]], 2) for each in (keys, values))
        scores = query.view(1, 2, 2, 32) @ keys.mT * 0.2
        expected = (scores.softmax(-1) @ values).view(1, 1, 4, 32)
        for output in outputs:
            assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_two_caches_decode_at_the_same_time(fitted: tuple[Any, Calibration]) -> None:
    model, _ = fitted
    batches = [tokens(1, 50), tokens(3, 48, seed=1)]
    with attach(*fitted, selecting()) as session:

        def work(ids: Tensor) -> Tensor:
            return run(model, session.new_cache(), ids, prompt=PROMPT)

        expected = [work(ids) for ids in batches]
        with ThreadPoolExecutor(2) as pool:
            for _ in range(2):
                for found, wanted in zip(pool.map(work, batches), expected, strict=True):
                    assert torch.equal(found, wanted)
