"""What a session makes of the storage settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from calibrating import calibrate_tiny, feed, selecting, tokens
from infinigen_kv import Calibration, InputError, attach
from infinigen_kv.storage.config import HARD_TO_PREDICT, StorageConfig, hard_layers
from infinigen_kv.storage.pools.linked import LinkedPool
from infinigen_kv.storage.pools.local import LocalPool


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


@pytest.fixture(scope="module")
def gemma3() -> tuple[Any, Calibration]:
    model = tiny.gemma3()
    return model, calibrate_tiny(model)


def pools(fitted: tuple[Any, Calibration], rows: int = 2, **options: Any) -> list[Any]:
    """Pools of a cache with these settings once it holds 40 tokens, sliding layers left out."""
    model, _ = fitted
    tokens_known = options.pop("tokens", 100)
    policy = options.pop("policy", "infinigen")
    with attach(*fitted, selecting(), StorageConfig(**options)) as session:
        cache = session.new_cache(policy=policy, tokens=tokens_known)
        feed(model, cache, tokens(rows, 40), None, slice(0, 40))
        return [layer.pool for layer in cache.offloaded]


def rooms(fitted: tuple[Any, Calibration], **options: Any) -> set[int]:
    return {pool.resident_budget for pool in pools(fitted, resident_layers=(), **options)}


def test_the_home_is_the_device_by_default(llama: tuple[Any, Calibration]) -> None:
    assert {type(pool) for pool in pools(llama)} == {LocalPool}
    settings: dict[str, Any] = {"link": "emulated:1000", "policy": "ideal"}
    assert {type(pool) for pool in pools(llama, **settings)} == {LocalPool}
    settings["policy"] = "stream"
    assert {type(pool) for pool in pools(llama, **settings)} == {LinkedPool}


def test_resident_sets(llama: tuple[Any, Calibration], tmp_path: Path) -> None:
    assert rooms(llama, link="emulated:1000") == {20}, "a fifth where entries cross a link"
    assert rooms(llama, home="disk", home_dir=tmp_path) == {20}
    assert rooms(llama, codec="int8") == {0}, "nothing where they cross none"
    assert rooms(llama, link="emulated:1000", resident=0.555) == {56}
    assert rooms(llama, link="emulated:1000", resident=0) == {0}
    assert rooms(llama, link="emulated:1000", tokens=0) == {8}, "of the prompt, where unknown"
    entry, layers, rows, heads = 2 * 16 * 4, 4, 2, 2
    nbytes = entry * layers * rows * heads * 7
    assert rooms(llama, link="emulated:1000", resident=nbytes) == {7}
    assert rooms(llama, link="emulated:1000", resident=nbytes - 1) == {6}
    assert rooms(llama, link="emulated:1000", resident=10**12) == {100}, "no more than there is"
    assert rooms(llama, link="emulated:1000", resident=10**12, capacity=32) == {32}
    for policy in ("stream", "infinigen-paper"):
        assert rooms(llama, link="emulated:1000", resident=0.5, policy=policy) == {0}


def test_bytes_for_resident_sets_go_to_the_layers_that_move(
    gemma3: tuple[Any, Calibration],
) -> None:
    entry, rows, heads = 2 * 16 * 4, 2, 2
    options: dict[str, Any] = {"link": "emulated:1000", "resident": entry * rows * heads * 12}
    assert rooms(gemma3, **options) == {6}, "two of the four layers are sliding"
    found = pools(gemma3, resident_layers=(1,), **options)
    assert [type(pool) for pool in found] == [LocalPool, LinkedPool]
    assert found[1].resident_budget == 12


@pytest.mark.parametrize(("capacity", "limit"), [(17, 17), (0.255, 25), (1e-6, 2), (1.0, 100)])
def test_capacities(llama: tuple[Any, Calibration], capacity: float, limit: int) -> None:
    for pool in pools(llama, capacity=capacity, resident_layers=()):
        assert pool.all()[0].shape[2] == min(limit, 40)
        assert pool.length == 40
        assert pool.free == max(0, limit - 40)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("layers", [(4,), (-1,), (1, 99)])
def test_resident_layers_that_the_model_has_not(
    family: str, layers: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    fitted = request.getfixturevalue(family)
    full = [0, 1, 2, 3] if family == "llama" else [1, 3]
    missing = min(set(layers) - set(full))
    message = f"{missing} is not a layer with full attention; those are {full}"
    with attach(*fitted) as session, pytest.raises(InputError) as error:
        session.new_cache(storage=StorageConfig(link="emulated:1", resident_layers=layers))
    assert "resident_layers=" in str(error.value) and message in str(error.value)


def test_sliding_layers_cannot_be_resident(gemma3: tuple[Any, Calibration]) -> None:
    with attach(*gemma3) as session, pytest.raises(InputError, match="0 is not a layer with full"):
        session.new_cache(storage=StorageConfig(resident_layers=(0, 1)))


def test_hard_layers_stay_on_the_device(llama: tuple[Any, Calibration]) -> None:
    report = {"1": {"unexplained": HARD_TO_PREDICT + 0.01}, "2": {"unexplained": HARD_TO_PREDICT}}
    assert hard_layers(report) == {1}
    hard = {0} | hard_layers(llama[1].report)  # layer 0 has nothing to be rehearsed from
    found = pools(llama, link="emulated:1000")
    assert {index for index, pool in enumerate(found) if type(pool) is LocalPool} == hard


def test_the_rate_of_the_paper_has_to_be_given(llama: tuple[Any, Calibration]) -> None:
    with attach(*llama, storage=StorageConfig(link="emulated:paper")) as session:
        with pytest.raises(InputError, match="measure it with"):
            session.new_cache()
        pace = session.new_cache(link_rate=123.0).storage.link.pace
        assert pace is not None and pace.rate == 123.0
        assert session.new_cache(policy="ideal").storage.link.pace is None


def test_the_link_is_one_for_all_layers(llama: tuple[Any, Calibration]) -> None:
    with attach(*llama, storage=StorageConfig(link="emulated:16,10")) as session:
        cache = session.new_cache(policy="stream")
        feed(llama[0], cache, tokens(1, 8), None, slice(0, 8))
        pace = cache.storage.link.pace
        assert pace is not None
        assert (pace.rate, pace.latency) == (pytest.approx(16e9), pytest.approx(1e-5))
        links = {id(layer.pool._link) for layer in cache.offloaded}
        assert links == {id(cache.storage.link)}


def test_sizes_that_a_cache_reports(llama: tuple[Any, Calibration], tmp_path: Path) -> None:
    model, _ = llama
    entry = 2 * 16 * 4
    with attach(*llama, selecting()) as session:
        storage = StorageConfig(home="disk", home_dir=tmp_path, resident=0, resident_layers=())
        disk = session.new_cache(storage=storage, tokens=64)
        local = session.new_cache(tokens=64)
        for cache in (disk, local):
            feed(model, cache, tokens(2, 40), None, slice(0, 40))
        assert local.home_bytes == 0 and local.storage.bytes_on_disk == 0
        assert local.device_bytes >= 4 * 2 * 2 * 64 * entry
        assert disk.home_bytes == disk.storage.bytes_on_disk >= 4 * 2 * 2 * 64 * entry
        # on the device: only partial keys of layers 1 to 3, half of each key, with room to grow
        assert disk.device_bytes == sum(layer.policy.nbytes for layer in disk.offloaded)
        assert disk.storage.direct_io in (True, False) and local.storage.direct_io is None
        assert disk.device_bytes >= 3 * 2 * 2 * 40 * 8 * 4
        assert torch.isnan(torch.tensor(local.resident_hit_rate))
