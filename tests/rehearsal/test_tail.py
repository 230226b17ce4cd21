"""The estimate of what is left behind: against NumPy, and where it has to be exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from infinigen_kv.attention.dense import dense_attention
from infinigen_kv.attention.entries import Entries
from infinigen_kv.kernels.base import Kernels
from infinigen_kv.kernels.finding import find_kernels
from infinigen_kv.kernels.reference import TorchKernels
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.statistics import Moments, Projection
from infinigen_kv.rehearsal.tail import Tail, ValueMap, attention_in_blocks

ROWS, HEADS, KV_HEADS, DIM, TOKENS = 2, 6, 2, 8, 1100
SCALING = 0.4
PAD = 7


class Case:
    """Random entries, a projection of rank ``rank``, and a query with its own token."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.float32, heads: int = HEADS) -> None:
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.keys = random(ROWS, KV_HEADS, TOKENS, DIM).to(dtype)
        self.values = random(ROWS, KV_HEADS, TOKENS, DIM).to(dtype)
        self.query = random(ROWS, heads, 1, DIM).to(dtype)
        self.own_key = random(ROWS, KV_HEADS, 1, DIM).to(dtype)
        self.own_value = random(ROWS, KV_HEADS, 1, DIM).to(dtype)
        to_query, to_key = random(2, ROWS, KV_HEADS, DIM, rank)
        if rank == DIM:  # nothing of a score is lost
            to_query = to_key = torch.linalg.qr(to_query).Q
        self.projection = Projection(to_query, to_key, random(ROWS, KV_HEADS, 1, DIM))
        order = torch.rand((ROWS, KV_HEADS, TOKENS - PAD), generator=generator).argsort(dim=2)
        self.index = order[..., :30] + PAD

    def attend(self, kernels: Kernels, tail: Tail | None, softcap: float | None = None) -> Tensor:
        places = self.index.unsqueeze(-1).expand(-1, -1, -1, DIM)
        moved = Entries(self.keys.gather(2, places), self.values.gather(2, places), None)
        counts = None if tail is None else tail.counts
        output, _ = kernels.attend(
            self.query, moved, counts, self.own_key, self.own_value,
            scaling=SCALING, softcap=softcap, tail=tail,
        )  # fmt: skip
        return output

    def tail(self, counts: Tensor | None, allowed: Tensor | None) -> Tail:
        real = None if allowed is None else allowed.float()
        return Tail(
            PartialKeys(self.keys, self.projection),
            ValueMap.fit(self.projection, moments_of(self.keys, self.values, real)),
            self.index,
            counts,
            allowed,
        )

    def looped(self, tail: Tail, softcap: float | None) -> Tensor:
        """The same as loops in float64."""
        output = torch.empty(ROWS, 1, self.query.shape[1], DIM, dtype=torch.float64)
        group = self.query.shape[1] // KV_HEADS
        for row in range(ROWS):
            count = 30 if tail.counts is None else int(tail.counts[row, 0])
            for head in range(self.query.shape[1]):
                output[row, 0, head] = self._one(tail, row, head // group, head, count, softcap)
        return output

    def _one(
        self, tail: Tail, row: int, kv: int, head: int, count: int, softcap: float | None
    ) -> Tensor:
        def capped(score: Tensor) -> Tensor:
            return score if softcap is None else softcap * torch.tanh(score / softcap)

        q = self.query[row, head, 0].double() * SCALING
        exact = [(self.own_key[row, kv, 0], self.own_value[row, kv, 0])]
        chosen = self.index[row, kv, :count].tolist()
        exact += [(self.keys[row, kv, t], self.values[row, kv, t]) for t in chosen]
        scores = [capped(q @ key.double()) for key, _ in exact]
        top = max(scores)
        weights = [(score - top).exp() for score in scores]
        total = sum(weights)
        output = sum(w * value.double() for w, (_, value) in zip(weights, exact, strict=True))
        offset = self.projection.offset
        assert offset is not None
        mean, z = offset[row, kv, 0].double(), tail.partial.view()[row, kv].double()
        base, slope = tail.values.base[row, kv, 0], tail.values.slope[row, kv]
        for t in set(range(TOKENS)) - set(chosen):
            if tail.allowed is not None and not tail.allowed[row, t]:
                continue
            score = capped(q @ self.projection.query[row, kv].double() @ z[t] + q @ mean)
            weight = min(torch.ones(()).double(), (score - top).exp())
            total = total + weight
            output = output + weight * (base.double() + z[t] @ slope.double())
        return torch.as_tensor(output / total)


def moments_of(keys: Tensor, values: Tensor, weight: Tensor | None = None) -> Moments:
    """The keys are their own queries."""
    moments = Moments.start(keys, values)
    moments.observe(keys, keys, torch.arange(keys.shape[2])[None], weight, values)
    return moments


NATIVE = pytest.param("native", marks=pytest.mark.native)


def kernels_for(name: str) -> Kernels:
    if name == "native":
        return find_kernels("native", torch.device("cpu"), torch.float32)
    return TorchKernels()


@pytest.mark.parametrize("name", ["torch", NATIVE])
@pytest.mark.parametrize("rank", [3, 4, 6])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("uneven", [False, True])
def test_attention_equals_loops(name: str, rank: int, softcap: float | None, uneven: bool) -> None:
    case = Case(rank)
    counts = allowed = None
    if uneven:
        counts = torch.tensor([[30], [21]])
        allowed = torch.ones(ROWS, TOKENS, dtype=torch.bool)
        allowed[0, :PAD] = False
    tail = case.tail(counts, allowed)
    found = case.attend(kernels_for(name), tail, softcap)
    expected = case.looped(tail, softcap)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.native
@pytest.mark.parametrize("heads", [2, 4, 10])
def test_compiled_and_plain_agree_for_other_groups_and_bfloat16(heads: int) -> None:
    case = Case(5, torch.bfloat16, heads=heads)
    tail = case.tail(None, None)
    plain = case.attend(TorchKernels(), tail).float()
    compiled = case.attend(kernels_for("native"), tail).float()
    torch.testing.assert_close(compiled, plain, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["torch", NATIVE])
def test_it_is_full_attention_where_partial_keys_tell_all(name: str) -> None:
    """Full rank, and values that are linear in the keys."""
    case = Case(DIM)
    case.values = 0.5 + case.keys @ torch.randn(DIM, DIM)
    case.query = 0.2 * case.query  # so that no score of the tail exceeds those that were chosen
    scores = case.query.view(ROWS, KV_HEADS, -1, DIM) @ case.keys.mT
    margins = (scores - scores.amax(dim=3, keepdim=True)).amax(dim=2)
    case.index = margins.topk(30, dim=2).indices
    keys, values = (
        torch.cat(each, dim=2)
        for each in ((case.keys, case.own_key), (case.values, case.own_value))
    )
    full = dense_attention(case.query, keys, values, scaling=SCALING)
    kernels = kernels_for(name)
    error = (case.attend(kernels, case.tail(None, None)) - full).abs().max()
    without = (case.attend(kernels, None) - full).abs().max()
    assert error < 5e-3 < 0.2 < without  # the ridge is one token of 1100


@pytest.mark.parametrize("name", ["torch", NATIVE])
def test_nan_is_not_hidden(name: str) -> None:
    case = Case(4)
    tail = case.tail(None, None)
    tail.partial.storage[0, 1, 0, 900] = float("nan")
    assert 900 not in case.index[0, 1]
    output = case.attend(kernels_for(name), tail)
    broken = output.isnan().any(dim=-1)[:, 0]
    assert broken[0, HEADS // 2 :].all()
    assert not broken[1].any()


def test_values_are_guessed_by_ridge_regression() -> None:
    case = Case(3)
    weight = torch.ones(ROWS, TOKENS)
    weight[1, :40] = 0.0
    found = ValueMap.fit(case.projection, moments_of(case.keys, case.values, weight))
    for row in range(ROWS):
        for head in range(KV_HEADS):
            first = 40 if row == 1 else 0
            z = case.projection.partial_keys(case.keys)[row, head, first:].double().numpy()
            v = case.values[row, head, first:].double().numpy()
            centred = z - z.mean(axis=0)
            rows = np.vstack([centred, np.eye(3) * np.sqrt((z**2).mean(axis=0).max())])
            targets = np.vstack([v - v.mean(axis=0), np.zeros((3, DIM))])
            slope = np.linalg.lstsq(rows, targets, rcond=None)[0]
            base = v.mean(axis=0) - z.mean(axis=0) @ slope
            np.testing.assert_allclose(found.slope[row, head], slope, atol=1e-4)
            np.testing.assert_allclose(found.base[row, head, 0], base, atol=1e-4)


def test_few_tokens_give_no_steep_slopes() -> None:
    """Five tokens do not span the partial keys; others lie far outside of what they span."""
    case = Case(6)
    few = slice(0, 5)
    moments = moments_of(case.keys[:, :, few], case.values[:, :, few])
    projection = moments.projection(6)
    found = ValueMap.fit(projection, moments)
    guesses = found.base + projection.partial_keys(case.keys) @ found.slope
    assert guesses.abs().max() < 3 * case.values.abs().max()
    assert found.slope.is_contiguous()  # compiled code copies what is not, in every step


@pytest.mark.parametrize("name", ["torch", NATIVE])
def test_a_row_of_which_nothing_was_moved(name: str) -> None:
    """Its columns repeat a token that belongs to the tail all the same."""
    case = Case(4)
    case.index[1] = 0
    tail = case.tail(torch.tensor([[30], [0]]), None)
    tail.partial.storage[1, :, :, 0] *= 3  # so that the token counts
    expected = case.looped(tail, None)
    found = case.attend(kernels_for(name), tail)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)


def test_rows_are_taken_and_kept() -> None:
    case = Case(3)
    new = ValueMap.fit(case.projection, moments_of(case.keys, case.values))
    old = ValueMap(torch.zeros_like(new.base), torch.ones_like(new.slope))
    mixed = new.with_rows(torch.tensor([True, False]), old)
    assert torch.equal(mixed.slope[0], old.slope[0])
    assert torch.equal(mixed.base[1], new.base[1])
    assert torch.equal(new.rows(torch.tensor([1, 1])).slope[0], new.slope[1])
    assert new.nbytes == (3 + 1) * DIM * KV_HEADS * ROWS * 4


def test_many_queries_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(4)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(ROWS, HEADS, 9, DIM, generator=generator)
    attended = torch.rand((ROWS, KV_HEADS, 9, TOKENS), generator=generator) < 0.1
    tail = case.tail(None, None)
    given = (query, case.keys, case.values, attended, tail.partial, tail.values)
    hidden = attended.unsqueeze(2)
    at_once = attention_in_blocks(*given, hidden, scaling=SCALING, softcap=None)
    monkeypatch.setattr("infinigen_kv.rehearsal.tail.SCORES", 4 * ROWS * HEADS * TOKENS)
    in_blocks = attention_in_blocks(*given, hidden, scaling=SCALING, softcap=None)
    torch.testing.assert_close(in_blocks, at_once)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    case = Case(4)
    tail = case.tail(None, None)
    nothing = torch.zeros(ROWS, KV_HEADS, 1, TOKENS, dtype=torch.bool)
    output = attention_in_blocks(
        case.query, case.keys, case.values, nothing, tail.partial, tail.values,
        ~nothing.unsqueeze(2), scaling=SCALING, softcap=None,
    )  # fmt: skip
    assert output.abs().max() == 0
