"""Coded partial keys in compiled code, against PyTorch's reading of the same codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from calibrating import selecting
from fitting import DIM, HEADS, KV_HEADS, mixed, moments_of
from infinigen_kv.attention.entries import Entries
from infinigen_kv.errors import InfiniGenError
from infinigen_kv.kernels.native.kernels import NativeKernels
from infinigen_kv.kernels.reference import TorchKernels
from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.coded_partial_keys import CodedPartialKeys
from infinigen_kv.rehearsal.codes import CodeLayout
from infinigen_kv.rehearsal.select import Selection, group_margin
from infinigen_kv.rehearsal.tail import Tail, ValueMap
from selections import heads_of

pytestmark = pytest.mark.native

LAYOUTS = [
    CodeLayout(2, 3, 2), CodeLayout(8, 0, 0), CodeLayout(0, 5, 0), CodeLayout(0, 0, 1),
]  # fmt: skip
TOKENS = [40, 96, 130, 700]  # nothing coded, a group, nearly two, more than are read at once
DTYPES = [torch.float32, torch.bfloat16]


class Case:
    def __init__(
        self, layout: CodeLayout, tokens: int, dtype: torch.dtype = torch.float32, rows: int = 2
    ) -> None:
        self.query, keys, values = mixed(3, rows, tokens)
        self.keys, self.values = keys.to(dtype), values.to(dtype)
        moments = moments_of(self.query, keys, values)
        self.partial = CodedPartialKeys(self.keys, moments.projection(layout.rank), layout)
        none = torch.zeros(rows, dtype=torch.bool)
        # another height than the offset
        self.partial = self.partial.refitted(moments_of(*mixed(5, rows, 90)), none)
        self.map = ValueMap.fit(self.partial.projection, moments)
        self.step = Step(
            start=tokens, queries=1, rows=rows, visible=None, config=selecting(max_fetch=0.2),
            position_ids=torch.tensor([[tokens]]), selecting=True,
        )  # fmt: skip
        self.query = self.query[:, :, -1:].to(dtype)

    def chosen(self, kernels: NativeKernels | TorchKernels, softcap: float | None) -> Selection:
        return kernels.select(
            self.query, self.partial, self.step.candidates, scaling=0.05, alpha=1.0, softcap=softcap
        )

    def attended(
        self, kernels: NativeKernels | TorchKernels, selection: Selection, softcap: float | None
    ) -> Tensor:
        index, counts = selection.index.squeeze(2), selection.counts
        tail = Tail(self.partial, self.map, index, counts, None)
        output, _ = kernels.attend(
            self.query, Entries(self.keys, self.values, index), counts, self.keys[:, :, :1],
            self.values[:, :, :1], scaling=0.05, softcap=softcap, tail=tail,
        )  # fmt: skip
        return output


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_code_reads_what_pytorch_reads(
    layout: CodeLayout, tokens: int, softcap: float | None, dtype: torch.dtype
) -> None:
    case = Case(layout, tokens, dtype)
    native, plain = NativeKernels(), TorchKernels()
    selection = case.chosen(plain, softcap)
    found = case.chosen(native, softcap)
    assert found.counts is not None and selection.counts is not None
    assert torch.equal(found.counts, selection.counts)
    # codes tie, and which of two tokens goes first is open
    margin = group_margin(case.partial.scores(case.query, 0.05, softcap))[:, :, 0]
    for row in range(2):
        pairs = zip(heads_of(found, row, 0, 0), heads_of(selection, row, 0, 0), strict=True)
        for head, (mine, theirs) in enumerate(pairs):
            of_mine, of_theirs = (margin[row, head, sorted(each)] for each in (mine, theirs))
            torch.testing.assert_close(
                of_mine.sort().values, of_theirs.sort().values, atol=1e-4, rtol=1e-4
            )
    outputs = [case.attended(each, selection, softcap).float() for each in (native, plain)]
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*outputs, atol=tolerance, rtol=tolerance)


def test_tokens_that_come_are_read_before_and_after_they_are_coded() -> None:
    case = Case(LAYOUTS[0], 90, rows=1)
    native, plain = NativeKernels(), TorchKernels()
    _, keys, _ = mixed(9, 1, 300)
    for token in range(200):
        case.partial.settle(90 + token)
        native.append(case.partial, keys[:, :, token : token + 1])
        query = case.query[:, :, :1]
        wanted = case.partial.scores(query, 0.05, None)
        step = Step(
            start=91 + token, queries=1, rows=1, visible=None, config=selecting(max_fetch=0.2),
            position_ids=torch.tensor([[91 + token]]), selecting=True,
        )  # fmt: skip
        found, expected = (
            each.select(
                query, case.partial, step.candidates, scaling=0.05, alpha=1.0, softcap=None
            ).index
            for each in (native, plain)
        )
        margin = wanted.amax(dim=-1, keepdim=True) - wanted
        margin = margin.amin(dim=2).squeeze(2)  # (B, H_kv, T)
        gap = margin.gather(2, found.squeeze(2)).sort(-1).values
        same = margin.gather(2, expected.squeeze(2)).sort(-1).values
        torch.testing.assert_close(gap, same, atol=1e-4, rtol=1e-4)
    assert case.partial.length == 290 and case.partial.coded == 256
    projected = case.partial.projection.partial_keys(keys[:, :, 170:200])
    torch.testing.assert_close(case.partial.view()[:, :, 260:], projected, atol=1e-4, rtol=1e-4)


def test_what_is_no_number_is_reported() -> None:
    case = Case(LAYOUTS[0], 300)
    case.partial.grids[1, 0, 1, 1, 3] = float("nan")
    with pytest.raises(InfiniGenError, match="NaN or infinity"):
        case.chosen(NativeKernels(), None)


def test_shapes_of_these_tests() -> None:
    assert max(each.rank for each in LAYOUTS) == DIM and HEADS // KV_HEADS == 2
