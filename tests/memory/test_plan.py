"""The plan against what caches of tiny models really hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tiny
from calibrating import calibrate_tiny, feed, left_padded, selecting, tokens
from infinigen_kv import Calibration, InputError, Session, StorageConfig, attach
from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.cache.forward import prefill
from infinigen_kv.kernels.base import Kernels
from infinigen_kv.memory import MemoryPlan, Part, calibration_fields, model_request, plan_memory
from infinigen_kv.models.adapters import LayerSpec
from infinigen_kv.storage.homes.disk.scratch import BLOCK
from linking import FAST

PROMPT, NEW = 290, 6

APART: dict[str, dict[str, Any]] = {
    "in memory": {},
    "int8 in memory": {"codec": "int8"},
    "link": {"link": FAST, "resident_layers": (0,)},
    "link, hard layers stay": {"link": FAST},
    "link, all apart": {"link": FAST, "resident": 0.5, "resident_layers": ()},
    "link, resident bytes": {"link": FAST, "resident": 150_000, "resident_layers": (0,)},
    "link, resident everything": {"link": FAST, "resident": 10**12, "resident_layers": (0,)},
    "link, int4": {"link": FAST, "codec": "int4", "resident_layers": (0, 2)},
    "disk": {"home": "disk", "resident_layers": (0,)},
    "disk, int8": {"home": "disk", "codec": "int8", "resident": 0, "resident_layers": ()},
    "capacity": {"link": FAST, "capacity": 0.5, "resident_layers": (0,)},
    "capacity, int8": {"capacity": 200, "codec": "int8"},
}


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


def storage_of(settings: dict[str, Any], folder: Path) -> StorageConfig:
    return StorageConfig(**settings, home_dir=folder if settings.get("home") == "disk" else None)


def planned(session: Session, calibration: Calibration, **changes: Any) -> MemoryPlan:
    """The plan of `filled` with the same changes."""
    settings = {
        "context": PROMPT + NEW,
        "new_tokens": NEW,
        "config": session.config,
        "storage": session.storage,
        **calibration_fields(calibration),
        **changes,
    }
    return plan_memory(model_request(session.model, **settings))


def filled(
    session: Session,
    rows: int = 1,
    policy: str = "infinigen",
    chunk: int | None = None,
    mask: Tensor | None = None,
    prompt: int = PROMPT,
) -> InfiniGenCache:
    """A cache that has read a prompt and made some steps."""
    cache = session.new_cache(tokens=prompt + NEW, policy=policy)
    ids = tokens(rows, prompt + NEW)
    if mask is None:
        prefill(session, cache, ids[:, :prompt], chunk=chunk)
    else:
        feed(session.model, cache, ids, mask, slice(0, prompt))
    for place in range(prompt, prompt + NEW - 1):
        feed(session.model, cache, ids, mask, slice(place, place + 1))
    return cache


def check_layers(cache: InfiniGenCache, plan: MemoryPlan) -> None:
    """Every layer, home and device apart, to the byte."""
    (mine,) = plan.caches
    homes = [layer.pool.home_bytes for layer in cache.offloaded if layer.pool is not None]
    assert [layer.home for layer in mine.layers if not layer.window] == homes
    device = [
        layer.pool.device_bytes + layer.policy.nbytes
        for layer in cache.offloaded
        if layer.pool is not None
    ]
    assert [layer.device_kv for layer in mine.layers if not layer.window] == device
    assert mine.home_bytes == cache.home_bytes
    assert mine.device_bytes == cache.device_bytes
    assert plan["home"].host + plan["home"].disk == cache.home_bytes


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", APART)
def test_home_and_device_bytes(
    llama: tuple[Any, Calibration], tmp_path: Path, name: str, rows: int
) -> None:
    with attach(*llama, selecting(), storage_of(APART[name], tmp_path)) as session:
        plan = planned(session, llama[1], rows=rows)
        check_layers(filled(session, rows), plan)
        held = plan.caches[0].home_bytes + plan.caches[0].device_bytes
        assert held > 0 and (plan["home"].disk > 0) == (session.storage.home == "disk")


@pytest.mark.parametrize("policy", ["ideal", "stream", "stream-int4", "infinigen-paper"])
@pytest.mark.parametrize("name", ["link", "disk", "capacity, int8"])
def test_other_policies(
    llama: tuple[Any, Calibration], tmp_path: Path, name: str, policy: str
) -> None:
    with attach(*llama, selecting(), storage_of(APART[name], tmp_path)) as session:
        cache = filled(session, policy=policy)
        check_layers(cache, planned(session, llama[1], policies=(policy,)))


@pytest.mark.parametrize("policy", ["paging", "paging-h2o"])
def test_paging_takes_no_more_than_planned(
    llama: tuple[Any, Calibration], tmp_path: Path, policy: str
) -> None:
    with attach(*llama, selecting(), StorageConfig(home="disk", home_dir=tmp_path)) as session:
        cache = filled(session, policy=policy)
        plan = planned(session, llama[1], policies=(policy,))
        assert plan["home"].disk == plan.caches[0].home_bytes
        assert cache.device_bytes <= plan.caches[0].device_bytes
        assert plan.caches[0].home_bytes >= 4 * 2 * (PROMPT + NEW) * 2 * 16 * 4


@pytest.mark.parametrize("policy", ["h2o", "scissorhands", "streaming-llm", "quest", "oracle"])
def test_baselines_take_no_more_than_planned(llama: tuple[Any, Calibration], policy: str) -> None:
    with attach(*llama, selecting(), StorageConfig(link=FAST)) as session:
        cache = filled(session, policy=policy)
        (plan,) = planned(session, llama[1], policies=(policy,)).caches
        assert plan.home_bytes == cache.home_bytes
        # buffers that grow by halves are planned with the most that they may have to spare
        assert cache.device_bytes <= plan.device_bytes * 1.05 + 4 * 256 * 2 * 2 * 16 * 4


def test_prompt_in_chunks(llama: tuple[Any, Calibration]) -> None:
    storage = StorageConfig(link=FAST, codec="int8")
    with attach(*llama, selecting(), storage) as session:
        cache = filled(session, rows=2, chunk=64)
        check_layers(cache, planned(session, llama[1], rows=2, prompt_chunk=64))


@pytest.mark.parametrize("name", ["link", "disk"])
def test_coded_partial_keys(llama: tuple[Any, Calibration], tmp_path: Path, name: str) -> None:
    coded = selecting(index_bits="3x4+2x8", partial_ratio=None)
    found = []
    for config in (coded, selecting(partial_ratio=0.75)):
        with attach(*llama, config, storage_of(APART[name], tmp_path)) as session:
            plan = planned(session, llama[1], rows=2)
            check_layers(filled(session, 2), plan)
            found.append(plan["partial keys"].device)
    assert found[0] < 0.4 * found[1]


def test_padding_changes_nothing(llama: tuple[Any, Calibration]) -> None:
    with attach(*llama, selecting(), StorageConfig(link=FAST, codec="int8")) as session:
        _, mask = left_padded(tokens(2, PROMPT + NEW), (0, 100))
        cache = filled(session, rows=2, mask=mask)
        check_layers(cache, planned(session, llama[1], rows=2))


@pytest.mark.parametrize(("least", "keys"), [(20, True), (23, True), (500, False)])
def test_partial_keys_of_prompts_too_short_to_select(
    llama: tuple[Any, Calibration], least: int, keys: bool
) -> None:
    config = selecting(min_context=least)
    with attach(*llama, config) as session:
        cache = filled(session, prompt=20)
        plan = planned(session, llama[1], context=20 + NEW)
        check_layers(cache, plan)
        assert (plan["partial keys"].device > 0) is keys


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox", "mistral_sliding"])
def test_everything_that_a_cache_holds(family: str) -> None:
    """Also windows, statistics and corrections, of families with something of their own. Not the
    scratch memory of the kernels, which is part of a step.
    """
    model = tiny.TINY[family]()
    calibration = calibrate_tiny(model)
    with attach(model, calibration, selecting(), StorageConfig(codec="int8")) as session:
        cache = filled(session)
        plan = planned(session, calibration)
        check_layers(cache, plan)
        lasting = sum(part.device + part.host for part in plan.parts if part.phase == "always")
        lasting -= plan["weights"].device + plan["calibration"].host
        assert held_bytes(cache, model, calibration) == pytest.approx(lasting, rel=0.05)


def test_tokens_that_wait_for_the_next_fit(llama: tuple[Any, Calibration]) -> None:
    found = {}
    for every in (0, 256):
        with attach(*llama, selecting(refit_every=every)) as session:
            plan = planned(session, llama[1], rows=2, new_tokens=NEW)
            cache = filled(session, rows=2)
        found[every] = plan["rehearsal"].device, held_bytes(cache, *llama)
    planned_bytes, bytes_held = (found[256][at] - found[0][at] for at in range(2))
    assert bytes_held == pytest.approx(planned_bytes * (NEW - 1) / NEW, rel=0.05)


@pytest.mark.parametrize("name", ["in memory", "link, all apart", "capacity"])
@pytest.mark.parametrize("policy", ["infinigen", "infinigen-paper"])
def test_everything_that_a_llama_cache_holds(
    llama: tuple[Any, Calibration], tmp_path: Path, name: str, policy: str
) -> None:
    with attach(*llama, selecting(), storage_of(APART[name], tmp_path)) as session:
        cache = filled(session, rows=2, policy=policy)
        plan = planned(session, llama[1], rows=2, policies=(policy,))
        lasting = sum(part.device + part.host for part in plan.parts if part.phase == "always")
        lasting -= plan["weights"].device + plan["calibration"].host
        assert held_bytes(cache, *llama) == pytest.approx(lasting, rel=0.05)


def test_weights_and_calibration(llama: tuple[Any, Calibration]) -> None:
    model, calibration = llama
    with attach(model, calibration) as session:
        plan = planned(session, calibration)
    weights = sum(each.nbytes for each in [*model.parameters(), *model.buffers()])
    assert plan["weights"] == Part("weights", device=weights)
    layers = calibration.layers.values()
    learned = sum(each.nbytes for layer in layers for each in (layer.down, layer.up, layer.skew))
    assert plan["calibration"].host == learned
    with attach(model) as session:
        assert planned(session, calibration, policies=("stream",))["calibration"].host == 0


def test_a_hard_layer_stays_on_the_device(llama: tuple[Any, Calibration]) -> None:
    model, calibration = llama
    report = {name: {**fit, "unexplained": 0.1} for name, fit in calibration.report.items()}
    hard = replace(calibration, report={**report, "2": {**report["2"], "unexplained": 0.9}})
    with attach(model, hard, selecting(), StorageConfig(link=FAST)) as session:
        cache = filled(session)
        plan = planned(session, hard)
        check_layers(cache, plan)
        kept = [place for place, layer in enumerate(plan.caches[0].layers) if layer.whole]
        assert kept == [0, 2] == sorted(cache.resident_layers)


def test_several_caches_add_up(llama: tuple[Any, Calibration]) -> None:
    names = ("ideal", "stream", "infinigen")
    with attach(*llama, selecting(), StorageConfig(link=FAST)) as session:
        each = [planned(session, llama[1], policies=(name,)) for name in names]
        together = planned(session, llama[1], policies=names)
    for part in together.parts:
        alone = [plan[part.name].device + plan[part.name].host for plan in each]
        sums = max if part.name in ("weights", "calibration", "prompt") else sum
        assert part.device + part.host == sums(alone), part.name


def test_measuring_the_link_takes_the_whole_cache_twice(llama: tuple[Any, Calibration]) -> None:
    storage = StorageConfig(link="emulated:paper", codec="int4", resident=0)
    with attach(*llama, selecting(), storage) as session:
        plan = planned(session, llama[1], policies=("stream",))
        ideal = planned(session, llama[1], policies=("ideal",), storage=StorageConfig())
    twice = 2 * ideal.caches[0].device_bytes + ideal["prompt"].device
    weights = plan["weights"].device
    assert plan.total("device") == weights + twice > ideal.total("device")


def test_totals_count_the_longer_phase_only() -> None:
    parts = (
        Part("a", device=100, host=10, disk=1),
        Part("b", device=30, phase="prefill"),
        Part("c", device=20, host=40, phase="decode"),
    )
    apart = MemoryPlan(parts, (), unified=False)
    assert [apart.total(place) for place in ("device", "host", "disk")] == [130, 50, 1]
    together = MemoryPlan(parts, (), unified=True)
    assert [together.total(place) for place in ("device", "host", "disk")] == [170, 0, 1]


def test_a_cuda_device_is_apart_from_its_host(llama: tuple[Any, Calibration]) -> None:
    storage = StorageConfig(resident_layers=(0,))
    with attach(*llama, selecting(), storage) as session:
        here = planned(session, llama[1])
        there = planned(session, llama[1], device=torch.device("cuda"))
    assert here.unified and not there.unified
    layer = 2 * (PROMPT + NEW) * 2 * 16 * 4
    assert here["home"].host == 0 and there["home"].host == 3 * layer
    assert there["KV kept on the device"].device == layer
    assert there["resident set"].device > 0
    # each layer's home is pinned as the next power of two
    assert there["staging buffers"].host > 3 * (2**17 - layer) > 0


def test_limits_of_disk_buffers(llama: tuple[Any, Calibration], tmp_path: Path) -> None:
    storage = StorageConfig(home="disk", home_dir=tmp_path, resident_layers=(0,))
    with attach(*llama, selecting(), storage) as session:
        small = planned(session, llama[1], storage=replace(storage, queue_depth=1))
        deep = planned(session, llama[1])
    assert deep["staging buffers"].host - small["staging buffers"].host == 15 * 256 * 1024
    assert small["scales, tails, slots"].host == 3 * BLOCK  # an unfinished group of each layer


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"context": NEW}, f"context={NEW} is not valid: it must be an integer >= {NEW + 1}"),
        ({"rows": 0}, "rows=0 is not valid: it must be an integer >= 1"),
        ({"new_tokens": True}, "new_tokens=True is not valid"),
        ({"prompt_chunk": 0}, "prompt_chunk=0 is not valid"),
        ({"policies": ()}, "policies=()"),
        ({"policies": ("magic",)}, "policy='magic' is not valid"),
    ],
)
def test_bad_requests(llama: tuple[Any, Calibration], changes: dict[str, Any], reason: str) -> None:
    with attach(*llama) as session, pytest.raises(InputError) as caught:
        planned(session, llama[1], **changes)
    assert reason in str(caught.value)


def held_bytes(cache: InfiniGenCache, model: nn.Module, calibration: Calibration) -> int:
    """Bytes of all tensors and arrays of a cache that are not the model's or the calibration's."""
    others = {each.untyped_storage().data_ptr() for each in model.parameters()}
    for learned in calibration.layers.values():
        tensors = learned.down, learned.up, learned.skew
        others |= {each.untyped_storage().data_ptr() for each in tensors}
    found: dict[int, int] = {}
    for layer in cache.offloaded:
        assert layer.pool is not None
        layer.pool.discard()  # what is under way is part of a step
    for each in _arrays(list(cache.layers), set()):
        base = each if isinstance(each, Tensor) or each.base is None else each.base
        if isinstance(base, Tensor):  # an array may share a tensor's memory
            storage = base.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        else:
            found[base.__array_interface__["data"][0]] = base.nbytes
    return sum(nbytes for place, nbytes in found.items() if place not in others)


def _arrays(value: Any, seen: set[int]) -> Iterator[Any]:
    """Tensors and arrays that an object of this package or of Transformers' caches leads to."""
    apart = nn.Module | Session | LayerSpec | Calibration | Kernels
    if id(value) in seen or isinstance(value, apart):
        return
    seen.add(id(value))
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _arrays(each, seen)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _arrays(each, seen)
    elif type(value).__module__.startswith(("infinigen_kv", "transformers.cache_utils")):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        names = [*getattr(value, "__dict__", {}), *slots]
        for name in names:
            yield from _arrays(getattr(value, name, None), seen)
