"""A policy and a home of another package, found through its metadata alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
from command_line import TEXT, save
from infinigen_kv import InputError
from infinigen_kv.policies.registry import POLICIES
from infinigen_kv.storage.home_kinds.memory import RamKind
from infinigen_kv.storage.home_kinds.registry import HOMES

MODULE = """
import torch
from infinigen_kv.policies.base import Policy
from infinigen_kv.policies.entry import CachePlan, PolicyBytes, PolicyEntry, Selecting
from infinigen_kv.rehearsal.select import Selection
from infinigen_kv.storage.home_kinds.base import HomeBytes, HomeKind, StoreHome
from infinigen_kv.storage.homes.store import RamStore

class Newest(Policy):
    selects_at_layer = True

    def observe(self, query, keys, values, step, pool, slots):
        self.heads = keys.shape[1]

    def select_at_layer(self, query, step, pool):
        newest = torch.arange(step.start - 8, step.start)
        return Selection(newest.expand(step.rows, self.heads, 1, 8), None)

def planned(shape):
    return PolicyBytes(state=1000)

def plan(config, storage):
    return CachePlan(config, storage, Selecting(lambda parts: Newest(), planned))

class Attic(StoreHome):
    def store(self, rows, heads, entry_bytes, capacity, memory):
        return RamStore(rows, heads, entry_bytes, capacity, memory)

class AtticKind(HomeKind):
    name = "attic"
    summary = "a shelf"

    def open(self, use):
        return Attic()

    def planned(self, shape):
        return HomeBytes(home=7 * shape.rows * shape.heads * shape.entry_bytes * shape.slots)

POLICIES = (PolicyEntry("newest", "the newest eight", plan),)
HOMES = (AtticKind(),)
"""
ENTRY_POINTS = """
[infinigen_kv.policies]
made-up = made_up_systems:POLICIES
[infinigen_kv.homes]
made-up = made_up_systems:HOMES
"""
PLAN = """
import sys, torch, tiny
from infinigen_kv.memory import model_request, plan_memory
from infinigen_kv.storage.config import StorageConfig
for policies, home in (("newest", "ram"), ("stream", "ram"), ("stream", "attic")):
    plan = plan_memory(model_request(
        tiny.llama(), context=400, policies=(policies,), storage=StorageConfig(home=home)
    ))
    print(sum(layer.state for layer in plan.caches[0].layers), plan["home"].host)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages with one that brings a policy and a home."""
    folder = tmp_path / "site"
    metadata = folder / "made_up_systems-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "made_up_systems.py").write_text(MODULE)
    return folder


def python(site: Path, *words: object) -> str:
    """What a fresh interpreter prints that finds the package."""
    paths = [str(site), *(path for path in sys.path if path)]
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def command(site: Path, *words: object) -> dict[str, Any]:
    """The object on a command's last line."""
    lines = python(site, "-m", "infinigen_kv", *words, "--json").splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def test_a_plan_asks_them_what_they_hold(site: Path) -> None:
    newest, stream, attic = (line.split() for line in python(site, "-c", PLAN).splitlines())
    layers, heads, tokens, entry = 4, 2, 400, 2 * 16 * 4  # of tiny.llama()
    assert newest == [str(1000 * layers), "0"]
    assert stream == ["0", "0"]  # the model's memory is the home
    assert attic == ["0", str(7 * layers * heads * tokens * entry)]


def test_commands_take_them(site: Path, tmp_path: Path) -> None:
    model = save(tiny.llama(), tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    output = tmp_path / "calibration"
    python(site, "-m", "infinigen_kv", "calibrate", model, "--text", text, "--output", output)
    shared = (model, "--calibration", output)
    found = command(
        site, "generate", *shared, "--prompt", TEXT[:300], "--max-new-tokens", 4, "--home", "attic"
    )
    assert found["storage"]["home"] == "attic"
    timed = command(
        site, "bench", *shared, "--text", text, "--prompt-tokens", 400, "--decode-tokens", 4,
        "--policies", "newest,stream", "--home", "attic",
    )  # fmt: skip
    figures = {each["policy"]: each for each in timed["policies"]}
    assert figures["newest"]["link_bytes_per_step"] < 0.1 * figures["stream"]["link_bytes_per_step"]


def test_what_is_registered_twice_or_nowhere_is_refused() -> None:
    with pytest.raises(InputError, match="home 'ram' is registered already"):
        HOMES.register(RamKind())
    with pytest.raises(InputError, match=r"home=.rom. is not valid: did you mean ram\?"):
        HOMES["rom"]
    with pytest.raises(InputError, match="policy='newest' is not valid"):
        POLICIES["newest"]
