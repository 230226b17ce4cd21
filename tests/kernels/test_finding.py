"""Which kernels a cache gets, and what happens where the compiled ones cannot be had."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

import tiny
from calibrating import calibrate_tiny, run, selecting, tokens
from infinigen_kv import Calibration, InputError, attach
from infinigen_kv.kernels import finding as kernels
from infinigen_kv.kernels.base import Kernels
from infinigen_kv.kernels.finding import KernelsName, find_kernels
from infinigen_kv.kernels.reference import TorchKernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PROMPT, LENGTH = 40, 46


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As in a process that has not looked for numba yet; to be told what it finds."""
    for name in list(sys.modules):
        if name.startswith("infinigen_kv.kernels.native"):
            monkeypatch.delitem(sys.modules, name)
    found = kernels._native_kernels, kernels._warn_slow
    for each in found:
        each.cache_clear()
    yield monkeypatch
    for each in found:
        each.cache_clear()


def names(name: KernelsName, device: torch.device, dtype: torch.dtype) -> tuple[str, int]:
    """What one gets, and how many warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = find_kernels(name, device, dtype).name
    return found, len(seen)


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_has_native_kernels(dtype: torch.dtype) -> None:
    assert names("auto", CPU, dtype) == ("native", 0)
    assert names("native", CPU, dtype) == ("native", 0)
    assert names("torch", CPU, dtype) == ("torch", 0)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [(CPU, torch.float16), (CPU, torch.float64), (CUDA, torch.float32), (CUDA, torch.bfloat16)],
)
def test_elsewhere_pytorch_computes_and_nobody_is_bothered(
    device: torch.device, dtype: torch.dtype
) -> None:
    assert names("auto", device, dtype) == ("torch", 0)
    assert names("torch", device, dtype) == ("torch", 0)
    with pytest.raises(InputError, match=r"CPU in float32 or bfloat16.*use kernels='auto'"):
        find_kernels("native", device, dtype)


def test_a_wrong_name_is_told_the_right_ones(llama: tuple[Any, Calibration]) -> None:
    with pytest.raises(InputError, match=r"'numba' is not valid.*auto, native, torch"):
        find_kernels("numba", CPU, torch.float32)  # type: ignore[arg-type]
    with (
        pytest.raises(InputError, match="auto, native, torch"),
        attach(*llama, kernels="fast"),  # type: ignore[arg-type]
    ):
        pass


@pytest.mark.native
def test_a_cache_may_have_others_than_its_session(llama: tuple[Any, Calibration]) -> None:
    with attach(*llama, selecting(), kernels="torch") as session:
        assert _name(session.new_cache()) == "torch"
        assert _name(session.new_cache(kernels="native")) == "native"
    with attach(*llama, selecting()) as session:
        assert _name(session.new_cache()) == "native"
        assert _name(session.new_cache(kernels="torch")) == "torch"


def _name(cache: Any) -> str:
    kinds = {layer._kernels.name for layer in cache.offloaded}
    assert len(kinds) == 1
    return kinds.pop()


@pytest.mark.native
def test_caches_and_their_copies_share_no_scratch_memory(llama: tuple[Any, Calibration]) -> None:
    with attach(*llama, selecting()) as session:
        caches = [session.new_cache() for _ in range(2)]
        run(llama[0], caches[0], tokens(1, LENGTH), prompt=PROMPT)
        caches.append(deepcopy(caches[0]))
        used = [{id(each._kernels): each._kernels for each in c.offloaded} for c in caches]
        policies: list[list[Any]] = [[each.policy for each in c.offloaded[1:]] for c in caches]
        of_policies = [{id(policy._kernels) for policy in each} for each in policies]
    assert [len(each) for each in used] == [1, 1, 1]
    assert of_policies == [set(each) for each in used]
    scratch: list[Kernels] = [kernels for each in used for kernels in each.values()]
    assert len({id(each) for each in scratch}) == 3


@pytest.mark.native
def test_both_kernels_decode_the_same(llama: tuple[Any, Calibration]) -> None:
    model, _ = llama
    logits = []
    for name in ("native", "torch"):
        with attach(*llama, selecting(), kernels=name) as session:
            logits.append(run(model, session.new_cache(), tokens(2, LENGTH), prompt=PROMPT))
    assert not torch.equal(*logits)  # else both were the same kernels
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


# Without numba.


def test_without_numba_there_is_one_warning_and_pytorch(
    forgotten: pytest.MonkeyPatch, llama: tuple[Any, Calibration]
) -> None:
    model, _ = llama
    with attach(*llama, selecting(), kernels="torch") as session:
        expected = run(model, session.new_cache(), tokens(1, LENGTH), prompt=PROMPT)
    forgotten.setitem(sys.modules, "numba", None)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            with attach(*llama, selecting()) as session:
                caches = [session.new_cache() for _ in range(2)]
                for cache in caches:
                    assert _name(cache) == "torch"
                    actual = run(model, cache, tokens(1, LENGTH), prompt=PROMPT)
                    assert torch.equal(actual, expected)
    ours = [each for each in seen if "numba" in str(each.message)]
    assert len(ours) == 1
    assert "slower" in str(ours[0].message)
    assert "pip install 'infinigen-kv[native]'" in str(ours[0].message)


def test_without_numba_nobody_gets_native_kernels(
    forgotten: pytest.MonkeyPatch, llama: tuple[Any, Calibration]
) -> None:
    forgotten.setitem(sys.modules, "numba", None)
    for _ in range(2):
        with (
            pytest.raises(InputError, match=r"needs numba.*infinigen-kv\[native\].*'torch'"),
            attach(*llama, kernels="native"),
        ):
            pass
    assert names("auto", CPU, torch.float16) == ("torch", 0)
    assert names("torch", CPU, torch.float32) == ("torch", 0)
    assert names("auto", CPU, torch.float32) == ("torch", 1)
    assert names("auto", CPU, torch.float32) == ("torch", 0)


@pytest.mark.native
def test_a_compiler_that_is_switched_off_is_like_none(forgotten: pytest.MonkeyPatch) -> None:
    import numba

    forgotten.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(InputError, match="NUMBA_DISABLE_JIT"):
        find_kernels("native", CPU, torch.float32)
    with pytest.warns(UserWarning, match="NUMBA_DISABLE_JIT"):
        assert isinstance(find_kernels("auto", CPU, torch.float32), TorchKernels)


def test_a_compiler_whose_library_cannot_be_loaded_is_like_none(
    forgotten: pytest.MonkeyPatch,
) -> None:
    class Broken:
        def find_spec(self, name: str, path: Any, target: Any = None) -> None:
            if name == "infinigen_kv.kernels.native.kernels":
                raise OSError("Could not find/load shared object file")

    forgotten.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.warns(UserWarning, match="shared object file"):
        assert isinstance(find_kernels("auto", CPU, torch.float32), TorchKernels)
