"""Requests through a batch's rows: the same tokens as alone, in the order of their turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from calibrating import calibrate_tiny, covering, generate, selecting, tokens
from infinigen_kv import CacheStateError, Calibration, InputError, Session, attach
from infinigen_kv.batching.scheduling import Request, generate_rows, run_requests
from linking import apart, nothing_left

PROMPTS, NEW = (30, 7, 52, 1, 41, 12, 12), (9, 14, 1, 10, 5, 6, 3)
TOKENS = 80


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


@pytest.fixture
def session(llama: tuple[Any, Calibration]) -> Iterator[Session]:
    with attach(*llama, selecting()) as made:
        yield made


def requests() -> list[Request]:
    return [
        Request(tokens(1, prompt, seed=number), max_new_tokens=new)
        for number, (prompt, new) in enumerate(zip(PROMPTS, NEW, strict=True))
    ]


def plain(model: Any, **options: Any) -> list[list[int]]:
    """What Transformers generates with its own cache, one request after the other."""
    return [
        generate(model, torch.as_tensor(each.prompt_ids), new=each.max_new_tokens, **options)[
            0
        ].tolist()
        for each in requests()
    ]


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_full_attention_gives_the_tokens_of_generate(
    llama: tuple[Any, Calibration], rows: int
) -> None:
    expected = plain(llama[0])
    assert [len(each) for each in expected] == list(NEW)
    with attach(*llama, covering()) as session:
        for policy in ("ideal", "infinigen"):
            assert generate_rows(session, requests(), rows=rows, policy=policy) == expected


def test_selection_gives_the_tokens_of_generate(session: Session) -> None:
    expected = []
    for each in requests():
        cache = session.new_cache(tokens=each.tokens)
        cache.expect_prompt(each.prompt_tokens)
        ids = torch.as_tensor(each.prompt_ids)
        expected.append(generate(session.model, ids, cache, new=each.max_new_tokens)[0].tolist())
    assert generate_rows(session, requests(), rows=3) == expected


def test_stop_tokens(llama: tuple[Any, Calibration]) -> None:
    """One that some continuations hold, and others do not."""
    model, _ = llama
    free = plain(model)
    stop = free[0][3]
    expected = plain(model, eos_token_id=stop)
    expected = [each[: each.index(stop) + 1] if stop in each else each for each in expected]
    assert expected != free
    with attach(model) as session:
        options: dict[str, Any] = {"rows": 3, "policy": "ideal"}
        assert generate_rows(session, requests(), stop_tokens=[stop], **options) == expected
        assert generate_rows(session, requests(), stop_tokens=[], **options) == free


@pytest.mark.parametrize("several", [False, True])
def test_the_models_own_stop_tokens(
    llama: tuple[Any, Calibration], several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = llama
    stop = plain(model)[0][3]
    own = [stop, tiny.VOCABULARY - 1] if several else stop
    monkeypatch.setattr(model.generation_config, "eos_token_id", own)
    with attach(model) as session:
        found = generate_rows(session, requests(), rows=3, policy="ideal")
    assert found[0][-1] == stop and len(found[0]) < NEW[0]


def test_requests_take_their_turn(session: Session) -> None:
    """No more are read than there are rows; a free row is filled before the next step."""
    taken: list[int] = []

    def waiting() -> Iterator[Request]:
        for number, each in enumerate(requests()):
            taken.append(number)
            yield each

    with session.new_batch(rows=2, tokens=TOKENS) as batch:
        done = []
        for number, found in run_requests(batch, waiting()):
            assert len(found) == NEW[number]
            done.append(number)
            assert len(taken) <= len(done) + 1 + batch.free
            assert batch.free >= 1
        # by hand: 0 and 1 start; 0 is over after 9 tokens, then 2, which has one, then 3, ...
        assert done[:3] == [0, 2, 1]
        assert sorted(done) == list(range(len(PROMPTS)))
        assert batch.free == 2


def test_rows_that_somebody_else_holds(session: Session) -> None:
    with session.new_batch(rows=2, tokens=TOKENS) as batch:
        held = batch.join(tokens(1, 10))
        assert len(dict(run_requests(batch, requests()))) == len(PROMPTS)
        other = batch.join(tokens(1, 10))
        with pytest.raises(CacheStateError, match="all 2 rows are taken"):
            next(run_requests(batch, requests()))
        assert [held.length, other.length] == [10, 10]
        assert dict(run_requests(batch, [])) == {}


@pytest.mark.parametrize(
    ("prompt", "new", "words"),
    [
        ([], 4, "the prompt is empty"),
        (torch.zeros(1, 0, dtype=torch.long), 4, "the prompt is empty"),
        ([3], 0, "max_new_tokens=0"),
        ([3], True, "max_new_tokens=True"),
    ],
)
def test_requests_that_there_are_not(prompt: Any, new: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Request(prompt, max_new_tokens=new)


def test_a_request_that_is_too_long_is_refused_before_the_first(session: Session) -> None:
    long = Request(tokens(1, 500), max_new_tokens=13)
    with pytest.raises(InputError, match="513 tokens"):
        generate_rows(session, [*requests(), long])
    assert generate_rows(session, []) == []


def test_nothing_is_left_where_it_stops_halfway(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nothing_left(tmp_path):
        monkeypatch.setattr(Request, "tokens", property(lambda each: each.prompt_tokens))
        with pytest.raises(CacheStateError, match="which is all that it was made for"):
            generate_rows(session, requests(), storage=apart("disk", tmp_path))
