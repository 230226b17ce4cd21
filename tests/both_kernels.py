"""Runs a contract suite on both kernels: a module imports the fixture to have all its tests so."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from infinigen_kv.kernels.base import Kernels
from infinigen_kv.kernels.finding import NATIVE_DTYPES, KernelsName, find_kernels
from infinigen_kv.session import attach as session

BOTH: tuple[KernelsName, ...] = ("native", "torch") if find_spec("numba") else ("torch",)


@pytest.fixture(params=BOTH, scope="module", autouse=True)
def both_kernels(request: pytest.FixtureRequest) -> Iterator[KernelsName]:
    """Whatever asks for ``auto`` gets these; float16 has no native ones."""

    def find(name: KernelsName, device: torch.device, dtype: torch.dtype) -> Kernels:
        known = name == "auto" and (request.param == "torch" or dtype in NATIVE_DTYPES)
        return find_kernels(request.param if known else name, device, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "find_kernels", find)
        yield request.param
