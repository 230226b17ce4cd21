"""Prompts read in pieces: the same as one shot, in bounded memory, and fitted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

import tiny
from allocations import largest_made
from calibrating import (
    calibrate_tiny,
    covering,
    feed,
    generate,
    left_padded,
    reference,
    selecting,
    tokens,
)
from infinigen_kv import Calibration, InputError, LanguageModel, Session, attach
from infinigen_kv.attention import dense as attention_module
from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.cache.forward import forward, piece_length, prefill
from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.models.loading import LoadedModel
from infinigen_kv.rehearsal import statistics
from infinigen_kv.rehearsal.statistics import Magnitudes, Moments
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv.storage.pools.linked import LinkedPool
from infinigen_kv.storage.pools.local import LocalPool
from linking import FAST, apart

PROMPT, LENGTH, CHUNK = 50, 58, 16
HOMES: dict[str, dict[str, Any]] = {
    "local": {},
    "emulated": {"link": FAST, "resident": 0.5},
    "disk": {"home": "disk", "resident": 0.5},
}


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


def stored(name: str, folder: Path, **changes: Any) -> StorageConfig:
    settings = {"resident_layers": (), **HOMES[name], **changes}
    if name == "disk":
        settings["home_dir"] = folder
    return StorageConfig(**settings)


def read_in_pieces(
    session: Session, cache: InfiniGenCache, ids: Tensor, mask: Tensor | None, ends: list[int]
) -> Tensor:
    """Logits of a prompt ``(B, T)`` whose pieces end there, the last one at T."""
    cache.expect_prompt(ids.shape[1])
    starts = [0, *ends[:-1]]
    pieces = [slice(*span) for span in zip(starts, ends, strict=True)]
    return torch.cat([feed(session.model, cache, ids, mask, piece) for piece in pieces], dim=1)


# The result.


@pytest.mark.parametrize("family", sorted(tiny.TINY))
def test_pieces_give_what_transformers_own_cache_gives(family: str) -> None:
    model = tiny.TINY[family]()
    ids = tokens(2, PROMPT)
    expected = forward(model, ids, DynamicCache(config=model.config), last_only=True)
    with attach(model) as session:
        found = prefill(session, session.new_cache(policy="ideal"), ids, chunk=CHUNK)
    assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt"])
@pytest.mark.parametrize("home", HOMES)
def test_padded_pieces_give_what_transformers_own_cache_gives(
    family: str, home: str, tmp_path: Path
) -> None:
    """Also where a row begins only in a later piece, and where the last one is a single token."""
    model = tiny.TINY[family]()
    ids, mask = left_padded(tokens(3, PROMPT), (0, 5, 21))
    expected = reference(model, ids, mask, prompt=PROMPT)[mask.bool()]
    with attach(model, calibrate_tiny(model), covering()) as session:
        for ends in ([16, 32, 48, PROMPT], [1, 2, 20, PROMPT - 1, PROMPT]):
            cache = session.new_cache(storage=stored(home, tmp_path), tokens=PROMPT)
            found = read_in_pieces(session, cache, ids, mask, ends)
            assert_close(found[mask.bool()], expected, atol=1e-4, rtol=1e-4)


def chosen(cache: InfiniGenCache) -> list[list[int]]:
    assert isinstance(cache.recorder, FetchRecorder)
    return [sorted(each.index.flatten().tolist()) for _, each in cache.recorder.selections]


@pytest.mark.parametrize("rehearsal", ["calibrated", "paper"])
@pytest.mark.parametrize("home", HOMES)
def test_steps_after_pieces_select_what_steps_after_one_shot_do(
    llama: tuple[Any, Calibration], rehearsal: str, home: str, tmp_path: Path
) -> None:
    """The third row is long enough to select from only some steps after the prompt."""
    ids, mask = left_padded(tokens(3, LENGTH), (0, 7, PROMPT - 4))
    with attach(*llama, selecting(rehearsal=rehearsal)) as session:
        found = []
        for ends in ([PROMPT], [16, 32, 48, PROMPT], [20, PROMPT - 1, PROMPT]):
            cache = session.new_cache(storage=stored(home, tmp_path), tokens=LENGTH)
            read_in_pieces(session, cache, ids[:, :PROMPT], mask[:, :PROMPT], ends)
            cache.recorder = FetchRecorder(keep_indices=True)
            steps = [
                feed(session.model, cache, ids, mask, slice(at, at + 1))
                for at in range(PROMPT, LENGTH)
            ]
            found.append((torch.cat(steps, dim=1), chosen(cache)))
    logits, indices = found[0]
    assert len(indices) == 3 * (LENGTH - PROMPT)  # layers that select
    for others, theirs in found[1:]:
        assert theirs == indices
        assert_close(others, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("home", ["emulated", "disk"])
def test_pieces_over_a_codec_stay_near_one_shot(
    llama: tuple[Any, Calibration], codec: str, home: str, tmp_path: Path
) -> None:
    """A later piece attends to what the codec has left of the earlier ones, as a step does."""
    ids = tokens(2, 200)
    with attach(*llama, selecting()) as session:
        found = []
        for chunk in (None, 64):
            storage = stored(home, tmp_path, codec=codec)
            cache = session.new_cache(storage=storage, tokens=201)
            last = prefill(session, cache, ids, chunk=chunk)
            with torch.no_grad():
                step = forward(session.model, ids[:, :1], cache)
            found.append(torch.cat([last, step], dim=1).log_softmax(-1))
    distance = (found[0].exp() * (found[0] - found[1])).sum(-1).mean().item()
    assert 0 < distance < {"int8": 0.002, "int4": 0.2}[codec]


@pytest.mark.parametrize("chunk", [16, 25, 49])
def test_prompt_in_pieces_of_transformers_own_making(
    llama: tuple[Any, Calibration], chunk: int, tmp_path: Path
) -> None:
    """Nobody says how long the prompt is: the first step that selects fits, from all pieces."""
    model, calibration = llama
    ids = tokens(2, PROMPT)
    with attach(model, calibration, selecting()) as session:
        for home in ("local", "disk"):
            texts, indices = [], []
            for options in ({}, {"prefill_chunk_size": chunk}):
                cache = session.new_cache(storage=stored(home, tmp_path), tokens=80)
                if chunk == PROMPT - 1:  # a last piece of one token would be a decode step
                    cache.expect_prompt(PROMPT)
                cache.recorder = FetchRecorder(keep_indices=True)
                texts.append(generate(model, ids, cache, new=8, **options).tolist())
                indices.append(chosen(cache))
            assert texts[0] == texts[1]
            assert indices[0] == indices[1] != []


# Fitting.


def fits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the fits, and refuses to read a pool for one."""
    counted: list[int] = []
    for kind in (Moments, Magnitudes):

        def count(sums: Any, rank: int, projection: Any = kind.projection) -> Any:
            counted.append(rank)
            return projection(sums, rank)

        monkeypatch.setattr(kind, "projection", count)

    def refuse(pool: Any) -> Any:
        raise AssertionError("read again")

    for pool in (LocalPool, LinkedPool):
        monkeypatch.setattr(pool, "all", refuse)
    return counted


@pytest.mark.parametrize("rehearsal", ["calibrated", "paper"])
@pytest.mark.parametrize("home", HOMES)
def test_a_prompt_is_fitted_once_and_read_by_nobody_else(
    llama: tuple[Any, Calibration],
    rehearsal: str,
    home: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = tokens(1, LENGTH)
    counted = fits(monkeypatch)
    with attach(*llama, selecting(rehearsal=rehearsal)) as session:
        cache = session.new_cache(storage=stored(home, tmp_path), tokens=LENGTH)
        cache.expect_prompt(PROMPT)
        ends = [16, 32, 48, PROMPT]
        for start, end in zip([0, *ends], ends, strict=False):
            assert not counted
            feed(session.model, cache, ids, None, slice(start, end))
        for at in range(PROMPT, LENGTH):
            feed(session.model, cache, ids, None, slice(at, at + 1))
    assert len(counted) == 3


@pytest.mark.parametrize("rehearsal", ["calibrated", "paper"])
def test_partial_keys_of_pieces_are_those_of_one_shot(
    llama: tuple[Any, Calibration], rehearsal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared as scores: the factors of a projection are free up to a rotation."""
    monkeypatch.setattr(statistics, "TOKEN_BLOCK", 7)
    ids = tokens(2, PROMPT)
    scores = []
    with attach(*llama, selecting(rehearsal=rehearsal)) as session:
        for chunk in (None, CHUNK):
            cache = session.new_cache(storage=StorageConfig(resident_layers=()))
            prefill(session, cache, ids, chunk=chunk)
            policies: list[Any] = [layer.policy for layer in cache.offloaded[1:]]
            held = [policy._partial_keys for policy in policies]
            assert all(each.length == PROMPT for each in held)
            query = torch.randn(2, 4, 1, 16, generator=torch.Generator().manual_seed(3))
            scores.append([each.scores(query, 1.0, None) for each in held])
    for one_shot, pieces in zip(*scores, strict=True):
        assert_close(pieces, one_shot, atol=1e-3, rtol=1e-3)


def test_statistics_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 40, 16, generator=generator)
    key = torch.randn(2, 2, 40, 16, generator=generator) + 3
    weight = (torch.arange(40) >= torch.tensor([[0], [19]])).float()
    position = (weight.cumsum(1) - 1).clamp_min(0).long()
    projections = []
    for block in (1000, 7):
        monkeypatch.setattr(statistics, "TOKEN_BLOCK", block)
        sums = Moments.start(key)
        sums.observe(query, key, position, weight)
        made = sums.projection(16)  # of full rank, so that scores are exact
        centred = key - key[:, :, 19:].mean(2, keepdim=True)
        found = query[:, :2] @ made.query @ made.partial_keys(key).mT
        wanted = query[:, :2] @ centred.mT
        for scores in (found, wanted):  # but for a constant of each query
            scores -= scores[..., 19:].mean(-1, keepdim=True)
        assert_close(found, wanted, atol=1e-3, rtol=1e-3)
        projections.append(made.query @ made.key.mT)
    assert_close(projections[1], projections[0], atol=1e-4, rtol=1e-4)


# Pieces.


@pytest.mark.parametrize(
    ("length", "chunk", "pieces"),
    [
        (40, None, [40]),
        (40, 40, [40]),
        (40, 1000, [40]),
        (40, 39, [20, 20]),
        (41, 20, [14, 14, 13]),
        (7, 2, [2, 2, 2, 1]),
        (3, 1, [1, 1, 1]),
    ],
)
def test_pieces_are_as_equal_as_can_be(
    llama: tuple[Any, Calibration], length: int, chunk: int | None, pieces: list[int]
) -> None:
    model, _ = llama
    seen: list[int] = []
    with attach(model) as session:
        cache = session.new_cache(policy="ideal")
        watch = model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        with watch:
            logits = prefill(session, cache, tokens(1, length), chunk=chunk)
        expected = prefill(session, session.new_cache(policy="ideal"), tokens(1, length))
    assert seen == pieces
    assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [0, -2])
def test_a_bad_chunk_is_named(llama: tuple[Any, Calibration], chunk: int) -> None:
    with attach(*llama) as session:
        cache = session.new_cache()
        with pytest.raises(InputError, match=f"chunk={chunk}.*>= 1"):
            piece_length(session, cache, 4, chunk)


@pytest.mark.parametrize("capacity", [30, 0.5])
def test_a_prompt_that_a_limited_home_cannot_hold_is_read_at_once(
    llama: tuple[Any, Calibration], capacity: float
) -> None:
    """Else its last pieces would not see what was evicted after the first ones."""
    ids = tokens(1, PROMPT)
    storage = StorageConfig(capacity=capacity, resident_layers=())
    with attach(*llama, selecting(), storage) as session:
        expected = prefill(session, session.new_cache(policy="ideal"), ids)
        cache = session.new_cache(tokens=LENGTH)
        assert piece_length(session, cache, 20, 8) == 7
        assert piece_length(session, cache, PROMPT, 8) == PROMPT
        assert_close(prefill(session, cache, ids, chunk=8), expected, atol=1e-4, rtol=1e-4)


def test_shares_refer_to_a_prompt_that_is_expected(
    llama: tuple[Any, Calibration], tmp_path: Path
) -> None:
    """Not to its first piece, which is all that a cache made for no length would see."""
    with attach(*llama, selecting()) as session:
        cache = session.new_cache(storage=apart("resident-some", tmp_path))
        prefill(session, cache, tokens(1, PROMPT), chunk=CHUNK)
        assert [layer.pool.resident_budget for layer in cache.offloaded] == [PROMPT // 2] * 4


class Words:
    """Token ids written out."""

    chat_template = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: list[int], **options: Any) -> str:
        return " ".join(map(str, ids))


def test_the_facade_reads_in_pieces_and_keeps_the_last_logits_only(
    llama: tuple[Any, Calibration],
) -> None:
    model, calibration = llama
    facade = LanguageModel(LoadedModel(model, cast(Any, Words()), "tiny"), calibration, selecting())
    prompt = " ".join(map(str, tokens(1, PROMPT)[0].tolist()))
    fed: list[int] = []
    decoded: list[int] = []
    watches = (
        model.model.register_forward_pre_hook(
            lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        ),
        model.lm_head.register_forward_pre_hook(
            lambda module, args: decoded.append(args[0].shape[1])
        ),
    )
    made = {}
    for chunk in (CHUNK, None, 2048):
        fed.clear(), decoded.clear()
        made[chunk] = facade.generate(prompt, max_new_tokens=5, prompt_chunk=chunk)
        pieces = [13, 13, 13, 11] if chunk == CHUNK else [PROMPT]
        assert fed == [*pieces, 1, 1, 1, 1]
        assert set(decoded) == {1}
    for watch in watches:
        watch.remove()
    assert made[CHUNK].token_ids == made[None].token_ids == made[2048].token_ids
    assert made[CHUNK].fetched_share == made[None].fetched_share < 0.5
    with pytest.raises(InputError, match="chunk=0"):
        facade.generate(prompt, max_new_tokens=1, prompt_chunk=0)


# Memory.

WIDE, QUERIES = 2048, 32


@pytest.mark.parametrize(
    ("family", "home", "padded"),
    [
        ("llama", "local", False),
        ("llama", "local", True),
        ("llama", "emulated", False),
        ("llama", "disk", False),
        ("gemma2", "local", False),
        ("gemma2", "local", True),
    ],
)
def test_the_largest_tensor_of_a_piece_is_bounded_by_the_piece(
    family: str, home: str, padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a piece in the middle, since the first one makes the cache and the last the partial keys.

    A layer's keys are ``WIDE * 32`` numbers here, the scores of a piece ``WIDE * 128``.
    """
    monkeypatch.setattr(attention_module, "SCORES", 4 * 4 * WIDE)
    model = tiny.TINY[family](max_position_embeddings=WIDE)
    ids, mask = left_padded(tokens(1, WIDE), (3 if padded else 0,))
    with attach(model, calibrate_tiny(model), selecting()) as session:
        storage = stored(home, tmp_path)
        cache = session.new_cache(storage=storage, tokens=WIDE)
        cache.expect_prompt(WIDE)
        seen = mask if padded else None
        feed(model, cache, ids, seen, slice(0, WIDE - 2 * QUERIES))
        with largest_made() as found:
            feed(model, cache, ids, seen, slice(WIDE - 2 * QUERIES, WIDE - QUERIES))
    bound = 4 * QUERIES * 128  # logits of the piece, which `feed` asks for; the rest is narrower
    if padded:
        bound = 4 * QUERIES * WIDE  # the mask as numbers
    elif home != "local":
        bound = 4 * 2 * 2 * 16 * WIDE  # keys and values of a layer, on their way from its home
    elif family == "gemma2":
        bound = 4 * 4 * 4 * WIDE  # the scores made at once
    assert 0 < found.nbytes <= bound, found
