"""What is said of a run that does not fit: every piece of advice is checked by planning with it."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch

from infinigen_kv import InputError, StorageConfig
from infinigen_kv.memory import (
    Advice,
    Budget,
    ModelGeometry,
    PlanRequest,
    advise,
    check_memory,
    plan_memory,
    readable,
    refusal,
    shortfalls,
)
from infinigen_kv.memory.geometry import LayerGeometry
from linking import FAST

DISK = 2**40
GIB = 2**30

# Sizes of an 8B model with grouped heads, in float32.
GEOMETRY = ModelGeometry(
    layers=tuple(LayerGeometry(index, 32, 8, 128, False, False, 0) for index in range(32)),
    dtype=torch.float32,
    hidden_size=4096,
    mlp_size=14336,
    vocabulary=128_256,
    max_positions=131_072,
    steady_positions=None,
    window=None,
    weight_bytes=30 * GIB,
)


def request(**settings: Any) -> PlanRequest:
    return PlanRequest(**{"geometry": GEOMETRY, "context": 20_000, "rows": 2, **settings})


def budget(run: PlanRequest, share: float, disk: int = DISK) -> Budget:
    """So much of what the run needs beside its weights."""
    weights = run.geometry.weight_bytes
    return Budget(weights + int((plan_memory(run).total("device") - weights) * share), None, disk)


def changed(run: PlanRequest, advice: Advice) -> PlanRequest:
    return reduce(lambda made, change: change.apply(made), advice.changes, run)


def names(found: list[Advice]) -> list[tuple[str, ...]]:
    return [tuple(change.name for change in each.changes) for each in found]


@pytest.mark.parametrize("share", [0.95, 0.7, 0.4, 0.2, 0.05])
@pytest.mark.parametrize(
    "storage",
    [
        StorageConfig(),
        StorageConfig(home="device"),
        StorageConfig(link=FAST),
        StorageConfig(link=FAST, codec="int8", capacity=0.5),
        StorageConfig(home="disk", resident=0.5),
    ],
)
def test_the_run_fits_with_every_advice(storage: StorageConfig, share: float) -> None:
    run = request(storage=storage)
    there = budget(run, share)
    found = advise(run, there)
    assert found
    for each in found:
        made = changed(run, each)
        assert not shortfalls(plan_memory(made), there), each.text("option")
        assert plan_memory(made) == each.plan


def test_the_mildest_value_of_a_setting_comes_first() -> None:
    run = request(storage=StorageConfig(link=FAST))
    found = advise(run, budget(run, 0.8))
    (codec,) = [each for each in found if each.changes[0].name == "codec"]
    assert codec.text("option").startswith("--codec int8 (")
    assert codec.text("setting").startswith("codec='int8' (")
    assert len(set(names(found))) == len(found)


def test_several_settings_only_where_none_suffices_and_no_more_than_needed() -> None:
    run = request(storage=StorageConfig(link=FAST, resident=0.4))
    there = budget(run, 0.3)
    several, *others = advise(run, there, fixed=("dtype",))
    assert len(several.changes) > 1
    for change in several.changes:
        without = replace(several, changes=tuple(c for c in several.changes if c is not change))
        assert shortfalls(plan_memory(changed(run, without)), there)
    assert names(others) == [("context",)]


def test_the_largest_batch_and_the_longest_context() -> None:
    run = request(rows=9)
    there = budget(run, 0.5)
    rows, context = advise(run, there)[-2:]
    assert names([rows, context]) == [("rows",), ("context",)]
    larger = replace(run, rows=changed(run, rows).rows + 1)
    longer = replace(run, context=changed(run, context).context + 1)
    assert 1 < larger.rows <= 9 and longer.context <= run.context
    for beyond in (larger, longer):
        assert shortfalls(plan_memory(beyond), there)


def test_settings_that_the_caller_cannot_change_are_left_out() -> None:
    run = request(rows=1)
    found = advise(run, budget(run, 0.5), fixed=("rows", "context", "dtype", "codec"))
    assert found
    assert not {"rows", "context", "dtype", "codec"} & {name for (name,) in names(found)}


def test_everything_at_once_where_that_is_needed() -> None:
    run = request(rows=500)
    (last,) = advise(run, Budget(18 * GIB, None, DISK))
    assert {"dtype", "home", "rows"} <= {change.name for change in last.changes}
    assert changed(run, last).rows < 500


def test_nothing_helps() -> None:
    run = request()
    there = Budget(GEOMETRY.weight_bytes // 3, None, DISK)
    assert advise(run, there) == []
    text = refusal(shortfalls(plan_memory(run), there), [], "option")
    assert "no setting makes it fit, so take a smaller model" in text


def test_a_full_disk() -> None:
    run = request(storage=StorageConfig(home="disk"))
    there = Budget(2**40, None, plan_memory(run).total("disk") - 1)
    found = names(advise(run, there))
    assert ("codec",) in found and ("home",) not in found
    (lack,) = shortfalls(plan_memory(run), there)
    assert "of disk space" in refusal([lack], [], "setting")


def test_a_cuda_device_can_move_its_home_to_the_host() -> None:
    run = request(storage=StorageConfig(home="device"), device=torch.device("cuda"))
    there = replace(budget(run, 0.9), host=2**40)
    texts = [each.text("option") for each in advise(run, there)]
    assert any(text.startswith("--home ram (") for text in texts)


def test_a_refusal_says_by_how_much_and_what_to_do() -> None:
    run = request(rows=1, storage=StorageConfig(link=FAST))
    needed = plan_memory(run).total("device")
    limit = budget(run, 0.8).device
    with pytest.raises(InputError) as caught:
        check_memory(run, device_memory=limit, fixed=("rows",))
    reason = str(caught.value)
    assert reason.startswith(f"the run needs {readable(needed)} of memory, ")
    assert f"{readable(needed - limit)} more than the {readable(limit)} there are" in reason
    assert "it fits with codec='int8' (" in reason and "rows" not in reason
    assert "home='disk'" in reason and "a context of at most " in reason
    assert reason.endswith("; device_memory sets another limit")
    assert check_memory(run, device_memory=needed) == plan_memory(run)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.50 KiB"),
        (20 * 2**20, "20.0 MiB"),
        (5 * 2**30, "5.00 GiB"),
        (3 * 2**42, "12288.0 GiB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert readable(nbytes) == text
