"""Every field of the storage settings with good and bad values."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infinigen_kv import InputError
from infinigen_kv.storage.config import StorageConfig

NAN = float("nan")
SHARE_ABOVE_0 = "a share in (0, 1] (a float) or an integer >= 2"
SHARE = "a share in [0, 1] (a float) or an integer >= 0"
INDICES = "'auto' or a tuple of layer indices"
ON_DISK: dict[str, Any] = {"home": "disk"}
BAD: list[tuple[str, Any, str]] = [
    *(
        ("home", value, "one of ram, disk, device, paged")
        for value in ("", "RAM", "ssd", None, 1, ["ram"])
    ),
    *(("codec", value, "one of none, int8, int4") for value in ("", "int2", None, 8, ["int8"])),
    *(
        ("evict", value, "one of fifo, lru, counter")
        for value in ("", "LRU", "random", None, dict[str, Any]())
    ),
    *(("link", value, "'none', 'emulated:paper' or") for value in ("", "pcie", None, 16, ["none"])),
    *(
        ("capacity", value, SHARE_ABOVE_0)
        for value in (0, 1, -5, 0.0, -0.1, 1.01, NAN, float("inf"), True, "80%", [0.5])
    ),
    *(
        ("resident", value, SHARE)
        for value in (-1, -0.1, 1.01, NAN, float("inf"), True, False, "20%", [0.5])
    ),
    *(
        ("resident_layers", value, INDICES)
        for value in ("all", "0", 0, None, (0.5,), ("1",), (True,), {0})
    ),
    *(("queue_depth", value, "an integer >= 1") for value in (0, -1, 1.0, NAN, True, "8", None)),
    *(("home_dir", value, "the path of a directory") for value in (3, ["/tmp"], True)),
    *(("pinned_bytes", value, "an integer >= 0") for value in (-1, 1.5, NAN, True, "1GiB")),
    *(("gather", value, "one of ") for value in ("", "gpu", None, 1)),
]
GOOD: list[tuple[str, Any]] = [
    ("home", "ram"), ("home", "disk"), ("home", "device"),
    ("codec", "none"), ("codec", "int8"), ("codec", "int4"),
    ("evict", "fifo"), ("evict", "lru"), ("evict", "counter"),
    ("link", "none"), ("link", "emulated:8"), ("link", "emulated:2,10"), ("link", "emulated:paper"),
    ("capacity", None), ("capacity", 2), ("capacity", 10**9), ("capacity", 1e-6), ("capacity", 1.0),
    ("resident", None), ("resident", 0), ("resident", 0.0), ("resident", 1.0), ("resident", 2**40),
    ("resident_layers", "auto"), ("resident_layers", ()), ("resident_layers", (3, 0)),
    ("queue_depth", 1), ("queue_depth", 64),
    ("home_dir", None), ("home_dir", Path("/anywhere")), ("home_dir", "/anywhere"),
    ("pinned_bytes", None), ("pinned_bytes", 0), ("gather", "auto"), ("gather", "host"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_a_bad_value_is_named_with_its_field_and_what_is_allowed(
    name: str, value: Any, allowed: str
) -> None:
    start, rest = f"{name}={value!r} is not valid: ", f"it must be {allowed}"
    hint = "(did you mean ram[?] )?" if name == "home" else ""
    with pytest.raises(InputError, match=f"^{re.escape(start)}{hint}{re.escape(rest)}"):
        StorageConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_good_values_are_kept(name: str, value: Any) -> None:
    together = {"evict": {"capacity": 100}, "queue_depth": ON_DISK, "home_dir": ON_DISK}
    config = StorageConfig(**{name: value, **together.get(name, {})})
    assert getattr(config, name) == value
    assert hash(config) == hash(replace(config))


def test_a_list_of_layers_stays_the_callers() -> None:
    layers: Any = [0, 2]
    config = StorageConfig(resident_layers=layers)
    layers.append(3)
    assert config.resident_layers == (0, 2)
    assert hash(config) == hash(StorageConfig(resident_layers=(0, 2)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"home_dir": Path("/anywhere")}, "home_dir='/anywhere' is not valid with home='ram'"),
        ({"queue_depth": 2}, "queue_depth=2 is not valid with home='ram'"),
        ({"home": "disk", "pinned_bytes": 5}, "pinned_bytes=5 is not valid with home='disk'"),
    ],
)
def test_an_option_that_nothing_uses_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        StorageConfig(**settings)


@pytest.mark.parametrize(
    "changes",
    [{"codec": "int8"}, {"capacity": 100}, {"link": "emulated:1"}, {"resident": 0.5}],
)
def test_a_home_on_the_device_takes_nothing_that_moves(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="home='device'"):
        StorageConfig(home="device", **changes)


def test_settings_of_one_place_need_nothing_moved() -> None:
    assert StorageConfig().is_local and StorageConfig(pinned_bytes=2).is_local
    for changes in (
        {"home": "disk"},
        {"link": "emulated:1"},
        {"codec": "int8"},
        {"capacity": 0.5},
        {"resident": 0.1},
    ):
        assert not StorageConfig(**changes).is_local
