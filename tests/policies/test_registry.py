"""Names, settings and plans of the policies."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from calibrating import calibrate_tiny, selecting, tokens
from infinigen_kv import InfiniGenConfig, InputError, attach
from infinigen_kv.cache.forward import forward
from infinigen_kv.policies.registry import POLICIES, cache_plan, check_policy
from infinigen_kv.policies.settings import PolicySettings
from infinigen_kv.storage.config import StorageConfig

NEEDED = (
    "ideal paging paging-h2o stream stream-int4 stream-int8 h2o scissorhands streaming-llm quest "
    "oracle infinigen-paper infinigen"
)
REHEARSING = {"infinigen", "infinigen-paper", "oracle"}
GIVEN = StorageConfig(
    home="disk",
    link="emulated:3",
    codec="int8",
    capacity=0.5,
    resident=0.4,
    home_dir=Path("/tmp"),
    resident_layers=(0,),
)


def test_every_system_of_the_comparison_is_there() -> None:
    assert set(POLICIES) == set(NEEDED.split())
    assert all(entry.summary and len(entry.summary) < 90 for entry in POLICIES.values())


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("h20", "did you mean h2o?"),
        ("H2O", "did you mean h2o?"),
        ("quests", "did you mean quest?"),
        ("stream-int2", "stream-int8 or stream-int4"),
        ("streamingllm", "did you mean streaming-llm"),
        ("infinigen_paper", "did you mean infinigen-paper"),
        ("orcale", "did you mean oracle?"),
    ],
)
def test_an_unknown_name_lists_near_ones(name: str, near: str) -> None:
    with pytest.raises(InputError, match=near) as caught:
        check_policy(name)
    assert f"policy={name!r} is not valid" in str(caught.value)
    assert "it must be one of infinigen, infinigen-paper" in str(caught.value)


@pytest.mark.parametrize("name", ["", "nothing like it", "policy"])
def test_a_name_like_none_gets_the_list(name: str) -> None:
    with pytest.raises(InputError, match="is not valid: it must be one of") as caught:
        check_policy(name)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_cache_uses_of_the_sessions_settings(policy: str) -> None:
    config = selecting(first_layer=2)
    plan = cache_plan(policy, config, GIVEN)
    assert plan.rehearses == (policy in REHEARSING)
    assert (plan.storage.home == "paged") == policy.startswith("paging")
    if policy == "ideal":
        assert plan.storage == StorageConfig(home="device")
        return
    assert (plan.storage.link, plan.storage.home_dir) == (GIVEN.link, GIVEN.home_dir)
    if policy in ("infinigen", "oracle"):
        assert (plan.storage, plan.config) == (GIVEN, config)
        return
    assert plan.storage.resident == 0
    codecs = {"stream-int4": "int4", "paging": "none", "paging-h2o": "none"}
    assert plan.storage.codec == codecs.get(policy, "int8")
    keeps = policy.startswith(("stream", "infinigen")) and policy != "streaming-llm"
    assert plan.storage.capacity == (0.5 if keeps else None)


def test_packed_streaming_needs_a_home_apart() -> None:
    plan = cache_plan("stream-int4", InfiniGenConfig(), StorageConfig(home="device"))
    assert (plan.storage.home, plan.storage.codec) == ("ram", "int4")


# Settings.


@pytest.mark.parametrize("budget", [0, 0.0, -0.1, 1.0001, math.nan, math.inf, "0.2", None, True])
def test_budgets_that_are_refused(budget: Any) -> None:
    with pytest.raises(InputError, match=r"budget=.* in \(0, 1\]") as caught:
        PolicySettings(budget=budget)
    assert repr(budget) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("history", 0), ("recent", 0), ("sinks", -1), ("page_tokens", 0), ("history", 1.5)],
)
def test_settings_that_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name}={value!r} is not valid"):
        PolicySettings(**{name: value})


@pytest.mark.parametrize(
    ("budget", "cached", "expected"),
    [
        (0.2, 100, 20),
        (0.2, 104, 20),
        (0.2, 105, 21),
        (0.29, 100, math.floor(0.29 * 100)),
        (0.001, 100, 1),
        (1, 100, 100),
        (1.0, 11, 11),
        (0.2, 9, 9),
        (0.2, 0, 0),
    ],
)
def test_tokens_of_a_budget(budget: float, cached: int, expected: int) -> None:
    assert PolicySettings(budget=budget).tokens(cached, min_context=10) == expected


def test_a_session_without_a_calibration_makes_what_needs_none() -> None:
    model = tiny.llama()
    ids = tokens(1, 20)
    with attach(model, config=selecting()) as session:
        for policy in POLICIES:
            if policy in REHEARSING:
                with pytest.raises(InputError, match="without a calibration there are stream, "):
                    session.new_cache(policy=policy)
                continue
            cache = session.new_cache(policy=policy)
            with torch.no_grad():
                assert forward(model, ids, cache).isfinite().all()
            cache.close()


def test_a_bad_budget_makes_no_cache() -> None:
    model = tiny.llama()
    with attach(model, calibrate_tiny(model)) as session:
        for policy in ("h2o", "infinigen", "paging"):
            with pytest.raises(InputError, match=r"budget=1\.5"):
                session.new_cache(policy=policy, budget=1.5)
