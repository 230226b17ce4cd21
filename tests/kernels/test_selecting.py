"""The compiled selection against plain loops, and against PyTorch's.

Nearly all numbers here are small integers, so that scores are exact in any order of summation, in
float32 and bfloat16 alike, and ties are frequent. Which of several tied tokens is chosen is open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import InfiniGenError
from infinigen_kv.kernels.base import Kernels
from infinigen_kv.kernels.native.kernels import NativeKernels
from infinigen_kv.kernels.reference import TorchKernels
from infinigen_kv.policies.candidates import HeldCandidates
from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.select import Candidates, Selection
from infinigen_kv.rehearsal.statistics import Projection

SCALING = 0.25
DTYPES = [torch.float32, torch.bfloat16]
KERNELS = [NativeKernels, TorchKernels]


@dataclass
class Problem:
    """What `Kernels.select` is asked; ``real`` ``(B, T)`` is False for padding."""

    query: Tensor
    keys: Tensor
    projection: Projection
    real: Tensor
    softcap: float | None
    config: InfiniGenConfig

    @property
    def step(self) -> Step:
        rows, tokens = self.real.shape
        visible = torch.cat([self.real, torch.ones(rows, 1, dtype=torch.bool)], dim=1)
        return Step(
            start=tokens,
            queries=1,
            rows=rows,
            visible=None if bool(visible.all()) else visible,
            position_ids=torch.tensor([[tokens]]),
            selecting=True,
            config=self.config,
        )

    def solved_by(
        self, kernels: Kernels, candidates: Candidates | None = None
    ) -> list[list[list[int]]]:
        """Chosen tokens by row and KV head."""
        assert not isinstance(self.config.alpha, tuple)
        selection = kernels.select(
            self.query,
            PartialKeys(self.keys, self.projection),
            candidates or self.step.candidates,
            scaling=SCALING,
            alpha=self.config.alpha,
            softcap=self.softcap,
        )
        return chosen(selection)

    def margins(self, row: int, head: int, among: list[int]) -> dict[int, float]:
        """By token: how close it comes to the best of the query head that likes it most."""
        part = self.projection
        group = self.query.shape[1] // self.keys.shape[1]
        found = dict.fromkeys(among, -math.inf)
        for each in range(group):
            query = self.query[row, head * group + each, 0].double()
            partial = (query @ part.query[row, head].double()).tolist()
            scores = {}
            for token in among:
                key = self.keys[row, head, token].double()
                if part.offset is not None:
                    key = key - part.offset[row, head, 0].double()
                line = (key @ part.key[row, head].double()).tolist()
                score = SCALING * sum(a * b for a, b in zip(partial, line, strict=True))
                if self.softcap is not None:
                    if part.offset is not None:
                        score += SCALING * float(query @ part.offset[row, head, 0].double())
                    score = self.softcap * math.tanh(score / self.softcap)
                scores[token] = score
            for token in among:
                found[token] = max(found[token], scores[token] - max(scores.values()))
        return found


def chosen(selection: Selection) -> list[list[list[int]]]:
    rows = []
    for row, heads in enumerate(selection.index[:, :, 0].tolist()):
        count = len(heads[0]) if selection.counts is None else int(selection.counts[row, 0])
        rows.append([head[:count] for head in heads])
    return rows


def make(
    seed: int,
    *,
    rows: int = 2,
    heads: int = 2,
    group: int = 2,
    tokens: int = 20,
    dim: int = 4,
    rank: int = 3,
    dtype: torch.dtype = torch.float32,
    offset: bool = True,
    padding: tuple[int, ...] = (0, 0, 0),
    softcap: float | None = None,
    **settings: Any,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def integers(most: int, *shape: int) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).float()

    projection = Projection(
        integers(2, rows, heads, dim, rank),
        integers(1, rows, heads, dim, rank),
        integers(1, rows, heads, 1, dim) if offset else None,
    )
    return Problem(
        query=integers(3, rows, heads * group, 1, dim).to(dtype),
        keys=integers(4, rows, heads, tokens, dim).to(dtype),
        projection=projection,
        real=torch.arange(tokens) >= torch.tensor(padding[:rows])[:, None],
        softcap=softcap,
        config=InfiniGenConfig(**{"min_context": 1, **settings}),
    )


def check(problem: Problem, found: list[list[list[int]]], atol: float = 0.0) -> None:
    """Every head of a row chooses as many as the naive loop does, and the best ones."""
    config, (rows, heads) = problem.config, problem.keys.shape[:2]
    assert not isinstance(config.alpha, tuple)
    assert len(found) == rows
    for row in range(rows):
        past = problem.real[row].nonzero().flatten().tolist()
        kept = set(past[: config.sink_tokens])
        kept |= set(past[max(0, len(past) - config.recent_tokens) :])
        margins = [problem.margins(row, head, past) for head in range(heads)]
        wanted = sum(t in kept or m[t] > -config.alpha for m in margins for t in past)
        least = min(len(past), config.recent_tokens + config.sink_tokens)
        share = math.floor(float(np.float32(len(past)) * np.float32(config.max_fetch)))
        count = min(max(round(wanted / heads), least), max(share, least))
        if len(past) < config.min_context:
            count = len(past)
        assert len(found[row]) == heads
        for head, tokens in enumerate(found[row]):
            assert len(set(tokens)) == len(tokens) == count
            assert kept & set(tokens) == kept if count >= len(kept) else set(tokens) <= kept
            assert set(tokens) <= set(past)
            best = sorted((margins[head][t] for t in set(past) - kept), reverse=True)
            others = sorted((margins[head][t] for t in set(tokens) - kept), reverse=True)
            assert others == pytest.approx(best[: len(others)], abs=atol, rel=0)


shapes = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 3),
        "heads": st.integers(1, 3),
        "group": st.integers(1, 5),
        "tokens": st.integers(1, 40),
        "dim": st.integers(1, 5),
        "rank": st.integers(1, 9),
        "dtype": st.sampled_from(DTYPES),
        "offset": st.booleans(),
        "padding": st.just((0, 0, 0)) | st.tuples(*[st.integers(0, 40)] * 3),
    }
)
limits = st.fixed_dictionaries(
    {
        "alpha": st.sampled_from([0.0, 0.25, 1.0, 3.0, 40.0, 1e6]),
        "recent_tokens": st.integers(0, 6),
        "sink_tokens": st.integers(0, 4),
        "max_fetch": st.sampled_from([0.01, 0.2, 0.5, 0.9, 1.0]),
        "min_context": st.sampled_from([1, 8, 30]),
    }
)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), shape=shapes, limit=limits)
def test_choose_equals_a_loop(seed: int, shape: dict[str, Any], limit: dict[str, Any]) -> None:
    problem = make(seed, **shape, **limit)
    assume(problem.step.selecting)
    for kernels in KERNELS:
        check(problem, problem.solved_by(kernels()))


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10_000), shape=shapes, softcap=st.sampled_from([0.5, 2.0, 30.0]))
def test_choose_of_capped_scores_equals_a_loop(
    seed: int, shape: dict[str, Any], softcap: float
) -> None:
    """The offset of the keys, which shifts all scores of a query alike, matters here."""
    problem = make(seed, softcap=softcap, alpha=0.7389, max_fetch=0.9, **shape)
    assume(problem.step.selecting)
    for row, real in enumerate(problem.real):
        for head in range(problem.keys.shape[1]):
            margins = problem.margins(row, head, real.nonzero().flatten().tolist())
            assume(all(abs(margin + 0.7389) > 1e-4 for margin in margins.values()))
    for kernels in KERNELS:
        check(problem, problem.solved_by(kernels()), atol=1e-5 * softcap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [511, 512, 513, 1300])
def test_choose_beyond_a_block_of_tokens(tokens: int, dtype: torch.dtype) -> None:
    for rank in (1, 3, 4, 6, 9):
        problem = make(
            rank,
            rows=1,
            group=3,
            tokens=tokens,
            dim=3,
            rank=rank,
            dtype=dtype,
            alpha=6.0,
            recent_tokens=5,
            sink_tokens=2,
        )
        check(problem, problem.solved_by(NativeKernels()))


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("group", [1, 3])
def test_the_best_token_may_be_anywhere(tokens: int, group: int) -> None:
    problem = make(0, rows=1, heads=1, group=group, tokens=tokens, dim=1, rank=1, alpha=1.0,
                   recent_tokens=0, sink_tokens=0, max_fetch=1.0)  # fmt: skip
    problem.query[:], problem.projection.query[:] = 1, 1
    partial = PartialKeys(problem.keys, problem.projection)
    for token in range(tokens):
        partial.storage[..., :tokens] = -100
        partial.storage[..., token] = -3
        found = NativeKernels().select(
            problem.query, partial, problem.step.candidates, scaling=1.0, alpha=1.0, softcap=None
        )
        assert chosen(found) == [[[token]]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_real_numbers_are_ranked_as_in_torch(dtype: torch.dtype, softcap: float | None) -> None:
    """Random numbers of a model's size: the same tokens but for those that nearly tie."""
    generator = torch.Generator().manual_seed(3)
    rows, heads, group, tokens, dim, rank = 3, 3, 4, 700, 32, 10

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    projection = Projection(
        random(rows, heads, dim, rank) / 4,
        random(rows, heads, dim, rank),
        random(rows, heads, 1, dim),
    )
    problem = Problem(
        random(rows, heads * group, 1, dim).to(dtype),
        random(rows, heads, tokens, dim).to(dtype),
        projection,
        torch.ones(rows, tokens, dtype=torch.bool),
        softcap,
        InfiniGenConfig(alpha=4.0, max_fetch=0.8, min_context=1),
    )
    partial = PartialKeys(problem.keys, projection)
    margin = partial.scores(problem.query, SCALING, softcap)
    margin = (margin - margin.amax(-1, keepdim=True)).amax(2).squeeze(2)
    native, torched = (problem.solved_by(kernels()) for kernels in KERNELS)
    for row in range(rows):
        for head in range(heads):
            ours, theirs = native[row][head], torched[row][head]
            assert abs(len(ours) - len(theirs)) <= 1
            odd = set(ours) ^ set(theirs)
            assert len(odd) <= 4
            edge = margin[row, head][theirs].min()
            assert all(abs(float(margin[row, head, token] - edge)) < 1e-3 for token in odd)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000),
    tokens=st.integers(2, 20),
    evicted=st.integers(1, 20),
    padding=st.just((0, 0)) | st.tuples(st.integers(0, 9), st.integers(0, 9)),
    limit=limits,
)
def test_choose_among_held_tokens(
    seed: int, tokens: int, evicted: int, padding: tuple[int, int], limit: dict[str, Any]
) -> None:
    """Slots of a home of limited capacity hold other tokens in every row, in any order."""
    problem = make(seed, tokens=tokens, **limit)
    total = tokens + evicted
    generator = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.randperm(total, generator=generator)[:tokens] for _ in range(2)])
    visible = torch.arange(total + 1) >= torch.tensor(padding)[:, None]
    step = Step(
        start=total,
        queries=1,
        rows=2,
        visible=None if bool(visible.all()) else visible,
        position_ids=torch.tensor([[total]]),
        selecting=True,
        config=problem.config,
    )
    assume(step.selecting)
    config = problem.config
    for kernels in KERNELS:
        found = problem.solved_by(kernels(), HeldCandidates(step, positions))
        for row in range(2):
            real = total - padding[row]
            place = {
                slot: position - padding[row]
                for slot, position in enumerate(positions[row].tolist())
            }
            held = [slot for slot in place if place[slot] >= 0]
            kept = {
                slot
                for slot in held
                if place[slot] < config.sink_tokens or place[slot] >= real - config.recent_tokens
            }
            margins = [problem.margins(row, head, held) for head in range(2)]
            alpha = config.alpha_of(1)
            wanted = sum(t in kept or m[t] > -alpha for m in margins for t in held)
            share = math.floor(float(np.float32(len(held)) * np.float32(config.max_fetch)))
            count = min(max(round(wanted / 2), len(kept)), max(share, len(kept)))
            if real < config.min_context:
                count = len(held)
            for margin, slots in zip(margins, found[row], strict=True):
                assert len(set(slots)) == len(slots) == count
                assert kept <= set(slots) <= set(held)
                best = sorted((margin[t] for t in set(held) - kept), reverse=True)
                assert (
                    sorted((margin[t] for t in set(slots) - kept), reverse=True)
                    == (best[: count - len(kept)])
                )


def test_columns_that_are_not_meant_are_tokens_of_the_row() -> None:
    problem = make(1, tokens=30, padding=(0, 20), alpha=0.0, max_fetch=0.3)
    selection = NativeKernels().select(
        problem.query,
        PartialKeys(problem.keys, problem.projection),
        problem.step.candidates,
        scaling=SCALING,
        alpha=0.0,
        softcap=None,
    )
    assert selection.counts is not None
    assert selection.counts.shape == (2, 1)
    assert selection.counts[0] > selection.counts[1]
    assert selection.index.shape == (2, 2, 1, selection.counts.max())
    assert bool(((selection.index >= 0) & (selection.index < 30)).all())


def test_one_row_needs_no_counts() -> None:
    problem = make(2, rows=1)
    selection = NativeKernels().select(
        problem.query,
        PartialKeys(problem.keys, problem.projection),
        problem.step.candidates,
        scaling=SCALING,
        alpha=1.0,
        softcap=None,
    )
    assert selection.counts is None


@pytest.mark.parametrize("kernels", KERNELS)
def test_scratch_memory_carries_nothing_over(kernels: type[Kernels]) -> None:
    """One instance serves layers of other shapes and a context that grows."""
    shared = kernels()
    for seed, (rows, heads, group, tokens) in enumerate(
        [(2, 3, 2, 50), (1, 1, 5, 7), (3, 2, 1, 200), (2, 3, 2, 51), (2, 3, 2, 9)]
    ):
        problem = make(seed, rows=rows, heads=heads, group=group, tokens=tokens, alpha=2.0)
        check(problem, problem.solved_by(shared))


@pytest.mark.parametrize("kernels", KERNELS)
def test_only_the_written_tokens_count(kernels: type[Kernels]) -> None:
    """What lies behind the last token in the storage is left over from others."""
    problem = make(4, tokens=25, alpha=2.0, recent_tokens=3)
    partial = PartialKeys(problem.keys, problem.projection)
    assert partial.storage.shape[3] > 25
    partial.storage[..., 25:] = math.nan
    selection = kernels().select(
        problem.query,
        partial,
        problem.step.candidates,
        scaling=SCALING,
        alpha=2.0,
        softcap=None,
    )
    check(problem, chosen(selection))


def test_inputs_may_be_strided_and_need_gradients() -> None:
    problem = make(5, rows=2, alpha=2.0)
    expected = problem.solved_by(NativeKernels())
    query = problem.query.repeat_interleave(2, dim=0)[::2].requires_grad_()
    wide = query.transpose(1, 3).contiguous().transpose(1, 3)
    assert not wide.is_contiguous()
    part = problem.projection
    strided = Projection(
        part.query.mT.contiguous().mT.requires_grad_(),
        part.key.mT.contiguous().mT.requires_grad_(),
        part.offset,
    )
    found = Problem(wide, problem.keys, strided, problem.real, None, problem.config)
    assert found.solved_by(NativeKernels()) == expected


# A broken model.


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("padding", [(0, 0), (0, 3)])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("broken", ["query", "one key", "all keys"])
def test_scores_that_are_no_numbers_are_reported(
    kernels: type[Kernels],
    dtype: torch.dtype,
    softcap: float | None,
    padding: tuple[int, int],
    number: float,
    broken: str,
) -> None:
    problem = make(6, dtype=dtype, padding=padding, softcap=softcap, alpha=3.0)
    partial = PartialKeys(problem.keys, problem.projection)
    query = problem.query.clone()
    if broken == "query":
        query[1, 3, 0, 2] = number
    else:
        tokens = slice(7, 8) if broken == "one key" else slice(0, 20)
        partial.storage[0, 1, :, tokens] = number
    used = kernels()
    with pytest.raises(InfiniGenError, match="NaN or infinity"):
        used.select(
            query, partial, problem.step.candidates, scaling=SCALING, alpha=3.0, softcap=softcap
        )
    check(problem, problem.solved_by(used), atol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_minus_infinity_is_never_chosen(kernels: type[Kernels]) -> None:
    """It is a score that nobody likes, until the other heads want more than this one has."""
    least = -math.inf

    def choose(*scores: list[float], alpha: float = 5.0) -> list[set[int]]:
        """Of two heads, with the first and the last token always kept."""
        problem = make(
            0, rows=1, group=1, tokens=6, dim=1, rank=1, alpha=alpha,
            recent_tokens=1, sink_tokens=1, max_fetch=1.0,
        )  # fmt: skip
        problem.query[:], problem.projection.query[:] = 1, 1
        partial = PartialKeys(problem.keys, problem.projection)
        partial.storage[0, :, 0, :6] = torch.tensor(scores)
        found = kernels().select(
            problem.query,
            partial,
            problem.step.candidates,
            scaling=1.0,
            alpha=alpha,
            softcap=None,
        )
        return [set(head) for head in chosen(found)[0]]

    some, few = [0, 1, least, least, 2, 0], [0, least, least, least, 2, 0]
    assert choose(some, some) == [{0, 1, 4, 5}] * 2
    assert choose(some, some, alpha=1e30) == [{0, 1, 4, 5}] * 2
    assert choose([least, 1, 1, 1, 2, least], [0.0] * 6) == [set(range(6))] * 2  # kept anyway
    with pytest.raises(InfiniGenError, match="NaN or infinity"):
        choose(few, [0.0] * 6)
    with pytest.raises(InfiniGenError, match="NaN or infinity"):
        choose([0.0] * 6, few, alpha=1e30)


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_padding_holds_is_not_looked_at(kernels: type[Kernels]) -> None:
    problem = make(7, tokens=20, padding=(0, 6), alpha=2.0)
    partial = PartialKeys(problem.keys, problem.projection)
    partial.storage[1, :, :, :6] = math.nan
    selection = kernels().select(
        problem.query, partial, problem.step.candidates, scaling=SCALING, alpha=2.0, softcap=None
    )
    check(problem, chosen(selection))


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_of_padding_alone_chooses_nothing(kernels: type[Kernels]) -> None:
    problem = make(8, tokens=20, padding=(0, 20), alpha=2.0)
    found = problem.solved_by(kernels())
    assert found[1] == [[], []]
    check(problem, found)
