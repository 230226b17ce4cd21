"""The benchmark's figures on a tiny model: what they must add up to, not how long anything took."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from calibrating import calibrate_tiny, covering, selecting, tokens
from infinigen_kv import Calibration, InputError, Session, attach
from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.cache.forward import forward
from infinigen_kv.policies.registry import POLICIES
from infinigen_kv.session import paper_link as paper_link_module
from infinigen_kv.session.paper_link import paper_link_rate
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv.storage.link import PAPER_RATIO
from infinigen_kv_lab.bench import run as bench_module
from infinigen_kv_lab.bench.run import BenchResult, bench
from linking import nothing_left

PROMPT, STEPS, ROWS = 40, 6, 2
LAYERS, HEADS, ENTRY = 4, 2, 2 * 16 * 4
KEYS = {
    "policy",
    "step_ms_median",
    "step_ms_p90",
    "tokens_per_s",
    "link_bytes_per_step",
    "disk_bytes_per_step",
    "link_wait_ms_per_step",
    "link_transfer_ms_per_step",
    "fetched_share",
    "resident_hit_rate",
    "home_bytes",
    "device_kv_bytes",
    "peak_rss_bytes",
    "prompt_seconds",
    "ratio_to_ideal",
    "kl_to_ideal",
    "resident_layers",
}


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


@pytest.fixture
def session(llama: tuple[Any, Calibration]) -> Iterator[Session]:
    storage = StorageConfig(link="emulated:1000", resident=0.5, resident_layers=())
    with attach(*llama, selecting(), storage) as session:
        yield session


def measured(session: Session, *policies: str, steps: int = STEPS) -> dict[str, dict[str, Any]]:
    result = bench(session, tokens(ROWS, PROMPT), decode_tokens=steps, policies=policies)
    values = result.to_dict()
    json.dumps(values)  # plain values only
    return {each["policy"]: each for each in values["policies"]}


def test_every_policy_has_every_figure(session: Session) -> None:
    figures = measured(session, *reversed([*POLICIES]), "stream")
    assert list(figures) == ["ideal", *(name for name in reversed([*POLICIES]) if name != "ideal")]
    for each in figures.values():
        assert set(each) == KEYS
        assert 0 < each["step_ms_median"] <= each["step_ms_p90"]
        assert each["tokens_per_s"] == pytest.approx(ROWS * 1e3 / each["step_ms_median"])
        ratio = each["step_ms_median"] / figures["ideal"]["step_ms_median"]
        assert each["ratio_to_ideal"] == pytest.approx(ratio)
        assert 0 <= each["link_wait_ms_per_step"] < 1e3 * 60
        assert each["peak_rss_bytes"] > 2**20 and each["prompt_seconds"] > 0


def test_bytes_of_a_disk_are_whole_blocks(llama: tuple[Any, Calibration], tmp_path: Path) -> None:
    storage = StorageConfig(home="disk", home_dir=tmp_path, resident=0, resident_layers=())
    with attach(*llama, selecting(), storage) as session:
        figures = measured(session, "stream", "infinigen", steps=1)
    assert figures["ideal"]["disk_bytes_per_step"] == 0
    per_block = 4096 // (HEADS * ENTRY)  # tokens; those of an incomplete block are not on the disk
    at = PROMPT + bench_module.WARM_UP
    whole = [ROWS * (length // per_block) * 4096 for length in (at, at + 1)]
    # of layer 0 a step moves what the next one needs
    assert figures["stream"]["disk_bytes_per_step"] == (LAYERS - 1) * whole[0] + whole[1]
    selected = figures["infinigen"]["disk_bytes_per_step"]
    assert selected % 4096 == 0 and 0 < selected <= figures["stream"]["disk_bytes_per_step"]


def test_what_streams_is_exact_and_what_selects_is_not(session: Session) -> None:
    figures = measured(session, "stream", "infinigen", "infinigen-paper")
    assert figures["ideal"]["kl_to_ideal"] == 0
    assert figures["stream"]["kl_to_ideal"] == pytest.approx(0, abs=1e-9)
    assert figures["ideal"]["ratio_to_ideal"] == 1
    for name in ("infinigen", "infinigen-paper"):
        assert 1e-3 < figures[name]["kl_to_ideal"] < 10
        assert 0.1 < figures[name]["fetched_share"] < 0.5


def test_bytes_over_the_link(session: Session) -> None:
    figures = measured(session, "stream", "infinigen", "infinigen-paper")
    assert figures["ideal"]["link_bytes_per_step"] == 0
    # steps 4 to 9 after the prompt; layer 0 is moved ahead, for the step after
    lengths = range(PROMPT + bench_module.WARM_UP, PROMPT + bench_module.WARM_UP + STEPS)
    moved = sum(LAYERS * length + 1 for length in lengths) + LAYERS * STEPS
    assert figures["stream"]["link_bytes_per_step"] == ROWS * HEADS * ENTRY * moved / STEPS
    selected = figures["infinigen-paper"]["link_bytes_per_step"]
    assert figures["infinigen"]["link_bytes_per_step"] < selected
    assert selected < figures["stream"]["link_bytes_per_step"]
    assert 0 < figures["infinigen"]["resident_hit_rate"] <= 1
    assert figures["infinigen-paper"]["resident_hit_rate"] == 0
    assert math.isnan(figures["ideal"]["resident_hit_rate"])
    entries = ROWS * HEADS * ENTRY * LAYERS * (PROMPT + STEPS)
    assert figures["ideal"]["home_bytes"] == 0 < entries < figures["ideal"]["device_kv_bytes"]
    assert figures["stream"]["home_bytes"] > entries > figures["stream"]["device_kv_bytes"] == 0


@pytest.mark.parametrize("policies", [(), ("ideal",), ("stream",)])
def test_ideal_is_always_there(session: Session, policies: tuple[str, ...]) -> None:
    assert list(measured(session, *policies, steps=1)) == ["ideal", *(set(policies) - {"ideal"})]


def test_all_policies_are_fed_what_ideal_generates(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: dict[int, list[list[int]]] = {}

    def watched(original: Any) -> Any:
        def run(model: Any, ids: Tensor, cache: InfiniGenCache) -> Any:
            fed.setdefault(id(cache), []).append(ids.flatten().tolist())
            return original(model, ids, cache)

        return run

    for name in ("forward", "timed_forward"):
        monkeypatch.setattr(bench_module, name, watched(getattr(bench_module, name)))
    measured(session, "stream", "infinigen")
    ideal, *others = fed.values()
    assert len(others) == 2 and others == [ideal, ideal]
    ids = tokens(ROWS, PROMPT)
    cache = session.new_cache(policy="ideal")
    with torch.no_grad():
        forward(session.model, ids, cache)
        expected, token = [], ids[:, -1:]
        for _ in range(bench_module.WARM_UP + STEPS):
            expected.append(token.flatten().tolist())
            token = forward(session.model, token, cache)[:, -1].argmax(-1, keepdim=True)
    assert ideal[: len(expected)] == expected


def test_what_the_figures_depend_on(session: Session) -> None:
    result = bench(session, tokens(ROWS, PROMPT), decode_tokens=1, policies=("stream",))
    assert isinstance(result, BenchResult)
    values = result.to_dict()
    assert values["link"] == "emulated:1000" and values["link_is_emulated"]
    assert values["link_rate"] == pytest.approx(1e12)
    assert (values["batch"], values["prompt_tokens"], values["decode_tokens"]) == (ROWS, PROMPT, 1)
    assert values["threads"] == torch.get_num_threads() and values["direct_io"] is None


def test_disk(llama: tuple[Any, Calibration], tmp_path: Path) -> None:
    storage = StorageConfig(home="disk", home_dir=tmp_path, resident_layers=())
    with attach(*llama, covering(), storage) as session, nothing_left(tmp_path):
        result = bench(session, tokens(1, PROMPT), decode_tokens=2, policies=("infinigen",))
    assert result.direct_io in (True, False)
    assert (result.link, result.link_is_emulated, result.link_rate) == ("none", False, None)
    assert result.policies[1].kl_to_ideal < 1e-6, "covering settings select everything"


@pytest.mark.parametrize("failing", ["prefill", "timed_forward", "forward"])
def test_a_failure_closes_all_caches(
    llama: tuple[Any, Calibration], failing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    storage = StorageConfig(home="disk", home_dir=tmp_path, resident_layers=())
    original, calls = getattr(bench_module, failing), iter(range(100))

    def broken(*given: Any, **options: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return original(*given, **options)

    monkeypatch.setattr(bench_module, failing, broken)
    with (
        attach(*llama, selecting(), storage) as session,
        nothing_left(tmp_path),
        pytest.raises(KeyboardInterrupt),
    ):
        bench(session, tokens(1, 8), decode_tokens=2, policies=("stream", "infinigen"))


# The link of the paper.


def test_the_papers_link_follows_from_a_block(
    llama: tuple[Any, Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 40 ms and 4 layers: a layer's KV takes 18.5 times 10 ms."""
    timed = paper_link_module.timed_forward

    def constant(*given: Any) -> tuple[Tensor, float]:
        return timed(*given)[0], 40.0

    monkeypatch.setattr(paper_link_module, "timed_forward", constant)
    storage = StorageConfig(link="emulated:paper", resident_layers=())
    seconds_of_a_layer = PAPER_RATIO * 0.010
    with attach(*llama, selecting(), storage) as session:
        rate = paper_link_rate(session, context=PROMPT, rows=ROWS)
        assert ROWS * HEADS * PROMPT * ENTRY / rate == pytest.approx(seconds_of_a_layer)
        monkeypatch.setattr(bench_module.Session, "new_cache", fast_cache(rate))
        result = bench(session, tokens(ROWS, PROMPT), decode_tokens=1, policies=("infinigen",))
    assert result.link_rate == pytest.approx(rate)
    assert result.link_is_emulated


def test_the_papers_link_on_a_model_with_sliding_layers() -> None:
    """Their window has passed, so the steps that measure a block cannot be taken back."""
    model = tiny.gemma3()
    storage = StorageConfig(link="emulated:paper", resident_layers=())
    with attach(model, calibrate_tiny(model), selecting(), storage) as session:
        assert paper_link_rate(session, context=PROMPT) > 0
        result = bench(session, tokens(1, PROMPT), decode_tokens=1, policies=("stream",))
    assert result.policies[1].kl_to_ideal == pytest.approx(0, abs=1e-9)


def fast_cache(expected: float) -> Any:
    """`Session.new_cache` that checks the rate of the link and then uses a faster one."""
    original = Session.new_cache

    def new_cache(session: Session, **options: Any) -> InfiniGenCache:
        if options["policy"] != "ideal":
            assert options["link_rate"] == pytest.approx(expected)
        return original(session, **{**options, "link_rate": 1e12})

    return new_cache


# Bad input, before any work.


@pytest.mark.parametrize("policies", [("h20",), ("stream", ""), ("ideal", "Stream")])
def test_unknown_policies(session: Session, policies: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=r"policy=.* must be one of infinigen, infinigen-paper"):
        measured(session, *policies)


def test_no_steps(session: Session) -> None:
    with pytest.raises(InputError, match="decode_tokens=0 is not valid"):
        measured(session, steps=0)


def test_more_tokens_than_the_model_has_positions(session: Session) -> None:
    steps = tiny.MAX_POSITIONS - PROMPT - bench_module.WARM_UP - bench_module.RECORDED
    with pytest.raises(InputError, match="positions"):
        measured(session, steps=steps + 1)


def test_an_empty_prompt(session: Session) -> None:
    with pytest.raises(InputError, match="prompt is empty"):
        bench(session, tokens(1, 0), decode_tokens=1, policies=())
