"""A device that disappears: a clear error, and nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import tiny
from calibrating import calibrate_tiny, covering, feed, reference, run, tokens
from infinigen_kv import DeviceError, StorageConfig, attach
from infinigen_kv.cache.faults import device_error, is_device_fault
from infinigen_kv.storage.link import Link
from linking import open_files

PROMPT, LENGTH = 40, 46
LOST = "CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later"
Breaking = Callable[[pytest.MonkeyPatch, Any, Any], None]


def lose(*args: Any, **kwargs: Any) -> Any:
    raise torch.AcceleratorError(LOST)


def break_attention(patch: pytest.MonkeyPatch, model: Any, cache: Any) -> None:
    for layer in cache.offloaded:
        patch.setattr(layer._kernels, "attend", lose, raising=True)
        patch.setattr(layer._kernels, "attend_all", lose, raising=True)


def break_rehearsal(patch: pytest.MonkeyPatch, model: Any, cache: Any) -> None:
    for layer in cache.offloaded:
        patch.setattr(layer._kernels, "select", lose)


def break_transfer(patch: pytest.MonkeyPatch, model: Any, cache: Any) -> None:
    patch.setattr(Link, "arrive", lose)


def break_model(patch: pytest.MonkeyPatch, model: Any, cache: Any) -> None:
    patch.setattr(model.model.layers[1].mlp, "forward", lose)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


@pytest.mark.parametrize(
    ("breaking", "home"),
    [
        *product((break_attention, break_rehearsal, break_model), ("device", "ram", "disk")),
        *product((break_transfer,), ("ram", "disk")),
    ],
)
def test_a_lost_device_is_said_and_its_cache_let_go(
    llama: tuple[Any, Any],
    breaking: Breaking,
    home: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = llama
    ids = tokens(1, LENGTH)
    threads = set(threading.enumerate())
    storage = StorageConfig(
        home=home,
        home_dir=tmp_path if home == "disk" else None,
        link="emulated:100" if home == "ram" else "none",
        resident=0.0 if home != "device" else None,
        resident_layers=(),
    )
    with attach(*llama, covering()) as session:
        cache = session.new_cache(storage=storage, tokens=LENGTH)
        other = session.new_cache()
        feed(model, cache, ids, None, slice(0, PROMPT))
        feed(model, other, ids, None, slice(0, PROMPT))
        files = open_files()
        with monkeypatch.context() as patch:
            breaking(patch, model, cache)
            # the model's own error is PyTorch's; whatever the engine touches is ours
            expected = torch.AcceleratorError if breaking is break_model else DeviceError
            with pytest.raises(expected, match="unspecified launch failure"):
                feed(model, cache, ids, None, slice(PROMPT, PROMPT + 1))
        assert cache.device_bytes == cache.home_bytes == 0
        assert set(threading.enumerate()) <= threads
        if home == "disk":
            assert open_files() < files
        with pytest.raises(DeviceError, match="read the prompt into a new cache"):
            feed(model, cache, ids, None, slice(PROMPT, PROMPT + 1))
        cache.reset()
        with pytest.raises(DeviceError, match="read the prompt into a new cache"):
            feed(model, cache, ids, None, slice(0, PROMPT))
        # others go on
        found = feed(model, other, ids, None, slice(PROMPT, LENGTH))
        assert_close(found, reference(model, ids, prompt=PROMPT)[:, PROMPT:], atol=1e-4, rtol=1e-4)
        again = session.new_cache(storage=storage, tokens=LENGTH)
        run(model, again, ids, prompt=PROMPT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (torch.AcceleratorError("anything"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("HIP error: invalid device"), True),
        (DeviceError("gone"), True),
        (torch.OutOfMemoryError("CUDA out of memory. CUDA error"), False),
        (RuntimeError("The size of tensor a (3) must match"), False),
        (ValueError("CUDA error"), False),
        (None, False),
    ],
)
def test_what_counts_as_a_lost_device(error: BaseException | None, fault: bool) -> None:
    assert is_device_fault(error) is fault


def test_the_error_names_the_device_and_the_reason() -> None:
    error = device_error(torch.AcceleratorError(LOST), torch.device("cuda:1"))
    assert str(error).startswith(
        "the device cuda:1 stopped working (CUDA error: unspecified launch failure); the KV"
    )
    assert device_error(RuntimeError("shapes"), torch.device("cpu")) is None
