"""The low-rank correction in compiled code, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infinigen_kv.kernels.native.kernels import NativeKernels
from infinigen_kv.kernels.reference import TorchKernels


def parts(rank: int, rows: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = {
        "down": (rank, 24),
        "bias": (rank,),
        "up": (rank, 40),
        "projected": (rows, 1, 40),
        "inputs": (rows, 1, 24),
    }
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def exact(down: Tensor, bias: Tensor, up: Tensor, projected: Tensor, inputs: Tensor) -> Tensor:
    narrow = inputs.double() @ down.double().T + bias.double()
    return projected.double() + narrow @ up.double()


@pytest.mark.parametrize("rank", [1, 4, 7, 32])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_equals_the_formula(rank: int, rows: int, dtype: torch.dtype) -> None:
    given = parts(rank, rows, dtype)
    expected = exact(**given)
    add = NativeKernels().low_rank(given["down"], given["bias"], given["up"])
    found = add(given["projected"].clone(), given["inputs"])
    assert found.dtype == dtype
    if dtype == torch.bfloat16:  # sums in float32, rounded once
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5)
    else:
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_do_not_depend_on_each_other() -> None:
    given = parts(32, 5, torch.bfloat16)
    add = NativeKernels().low_rank(given["down"], given["bias"], given["up"])
    together = add(given["projected"].clone(), given["inputs"])
    for row in range(5):
        alone = add(given["projected"][row : row + 1].clone(), given["inputs"][row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_many_tokens_go_through_pytorch() -> None:
    given = parts(8, 1, torch.float32)
    projected, inputs = torch.randn(2, 3, 40), torch.randn(2, 3, 24)
    add = NativeKernels().low_rank(given["down"], given["bias"], given["up"])
    plain = TorchKernels().low_rank(given["down"], given["bias"], given["up"])
    assert torch.equal(add(projected.clone(), inputs), plain(projected, inputs))


def test_a_projection_that_is_not_contiguous() -> None:
    given = parts(8, 2, torch.float32)
    wide = torch.randn(2, 1, 80)
    projected = wide[..., ::2]
    expected = exact(**{**given, "projected": projected})
    add = NativeKernels().low_rank(given["down"], given["bias"], given["up"])
    found = add(projected, given["inputs"]).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
