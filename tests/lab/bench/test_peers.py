"""Transformers' own caches beside ours."""

from __future__ import annotations

import copy
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from calibrating import calibrate_tiny, reference, selecting, tokens
from infinigen_kv import InputError, attach
from infinigen_kv.cache import forward as generate_module
from infinigen_kv_lab.bench import peers as peers_module
from infinigen_kv_lab.bench.peers import PEERS, Peers, check_peer, missing_for, twin
from infinigen_kv_lab.bench.run import bench

PROMPT, STEPS = 20, 5


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt", "gpt_neox"])
def test_a_twin_shares_the_weights_and_nothing_else(name: str) -> None:
    model = tiny.TINY[name]()
    made = twin(model)
    ids = tokens(2, PROMPT)
    assert torch.equal(reference(made, ids, prompt=PROMPT), reference(model, ids, prompt=PROMPT))
    mine = dict(model.named_parameters())
    assert all(each is mine[key] for key, each in made.named_parameters())
    before = copy.deepcopy(model.config)
    made.set_attn_implementation("eager")
    assert model.config._attn_implementation == before._attn_implementation != "eager"


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt", "gpt_neox"])
def test_a_twin_of_fewer_layers(name: str) -> None:
    model = tiny.TINY[name]()
    made = twin(model, layers=2)
    settings: dict[str, Any] = {"num_hidden_layers": 2}
    if getattr(model.config, "layer_types", None):
        settings["layer_types"] = list(model.config.layer_types[:2])
    small: Any = type(model)(type(model.config)(**{**model.config.to_dict(), **settings}))
    missing, _ = small.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    ids = tokens(1, PROMPT)
    expected = reference(small.eval(), ids, prompt=PROMPT)
    assert torch.equal(reference(made, ids, prompt=PROMPT), expected)
    assert model.config.num_hidden_layers == 4 and len(model.get_decoder().layers) == 4


@pytest.mark.parametrize("layers", [0, 5])
def test_layers_that_the_model_has_not(layers: int) -> None:
    with pytest.raises(InputError, match="in 1 to 4"):
        twin(tiny.llama(), layers=layers)


def test_exact_caches_agree_with_ideal() -> None:
    model = tiny.llama()
    calibration = calibrate_tiny(model)
    peers = Peers(model, ("StaticCache", "DynamicCache"), tokens=PROMPT + STEPS + 8)
    ids = tokens(2, PROMPT)
    peers.read(ids)
    with attach(model, calibration, selecting()) as session:
        bench(session, ids, decode_tokens=STEPS, policies=(), also=peers.step)
    static, dynamic = peers.results()
    assert (static.name, dynamic.name) == ("StaticCache", "DynamicCache")
    for each in (static, dynamic):
        assert each.kl_to_ideal == pytest.approx(0, abs=1e-6)  # float32
        assert each.prompt_seconds > 0
    assert peers.skipped == {}


def test_figures_follow_from_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    peers = Peers(model, ("DynamicCache",), tokens=PROMPT + 8)
    ids = tokens(3, PROMPT)
    peers.read(ids)
    took = [100.0, 0.010, 0.030, 0.020]  # the first one warms up
    ticks = iter(
        [tick for step, each in enumerate(took) for tick in (1e3 * step, 1e3 * step + each)]
    )
    monkeypatch.setattr(generate_module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    token, scores = ids[:, -1:], torch.full((3, tiny.VOCABULARY), -5.0).log_softmax(-1)
    for step in range(4):
        peers.step(token, scores, step > 0)
    (found,) = peers.results()
    times = [1e3 * each for each in took[1:]]
    assert found.step_ms_median == pytest.approx(statistics.median(times), abs=1e-6)
    assert found.step_ms_p90 == pytest.approx(30.0, abs=1e-6)
    assert found.tokens_per_s == pytest.approx(3 / 0.020, rel=1e-6)
    assert found.kl_to_ideal > 0.01, "the model is not as undecided as that reference"


def test_names() -> None:
    assert [check_peer(name.upper()) for name in PEERS] == list(PEERS)
    with pytest.raises(InputError, match=r"did you mean StaticCache\? it must be one of Dynamic"):
        check_peer("statik")


def test_a_quantised_cache_without_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_has", lambda module: False)
    peers = Peers(tiny.llama(), ("QuantizedCache",), tokens=10)
    assert "optimum-quanto or hqq" in peers.skipped["QuantizedCache"]
    peers.read(tokens(1, 4))
    assert peers.results() == []


def test_a_quantised_cache_on_sliding_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_has", lambda module: True)
    assert missing_for("QuantizedCache", tiny.llama()) is None
    why = missing_for("QuantizedCache", tiny.gemma3())
    assert why is not None and "not sliding_attention" in why
