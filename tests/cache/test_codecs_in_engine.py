"""Quantised homes in the engine: how far the logits move, and what happens to a broken model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from calibrating import calibrate_tiny, feed, left_padded, reference, run, selecting, tokens
from infinigen_kv import Calibration, InfiniGenError, attach
from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.storage.config import StorageConfig
from linking import FAST, apart, delays, same, without_threads

PROMPT, LENGTH = 150, 190
CODECS = ("int8", "int4")
LOUD, QUIET = (5, 13), (0, 2, 6, 9)  # channels of a head of 16, of which d and d + 8 rotate


def biased_qwen2(bias: float) -> Any:
    """Two channels of every key are ``bias`` larger than the others, as in Qwen2.

    Queries barely look there, or else one token would have all attention whatever the codec.
    """
    model = tiny.qwen2()
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.k_proj.bias.view(-1, 16)[:, list(LOUD)] += bias
            for channels in (LOUD, tuple((channel + 8) % 16 for channel in LOUD)):
                attention.q_proj.weight.view(-1, 16, 64)[:, list(channels)] *= 0.05
                attention.q_proj.bias.view(-1, 16)[:, list(channels)] *= 0.05
    return model


@pytest.fixture(scope="module", params=[0.0, 60.0], ids=["even-keys", "outliers"])
def biased(request: pytest.FixtureRequest) -> tuple[Any, Calibration]:
    model = biased_qwen2(request.param)
    return model, calibrate_tiny(model)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    model = tiny.llama()
    return model, calibrate_tiny(model)


def moved(expected: Tensor, actual: Tensor) -> float:
    """Mean KL(expected || actual) of the next-token distributions after the prompt, in nats."""
    ours, theirs = (each[:, PROMPT:].log_softmax(-1) for each in (actual, expected))
    return (theirs.exp() * (theirs - ours)).sum(-1).mean().item()


# Case O: large outliers in the keys.

# With and without outliers alike. Weights of random models are peaked, so the figures are far
# above those of a trained one; keys quantised token by token end above 2 nats with outliers.
GATES = {
    ("stream", "int8"): 0.005,
    ("stream", "int4"): 0.5,
    ("infinigen", "int8"): 0.1,
    ("infinigen", "int4"): 0.8,
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("policy", "home"), [("stream", "ram"), ("stream", "capped"), ("infinigen", "ram")]
)
def test_outliers_cost_no_accuracy(
    biased: tuple[Any, Calibration], codec: str, policy: str, home: str
) -> None:
    model, _ = biased
    ids, mask = left_padded(tokens(2, LENGTH), (0, 40))
    options: dict[str, Any] = {"link": FAST, "resident": 0, "resident_layers": ()}
    if home == "capped":
        options["capacity"] = LENGTH
    with attach(*biased, selecting()) as session:
        logits = {}
        for name in ("none", codec):
            storage = StorageConfig(codec=name, **options)
            cache = session.new_cache(policy=policy, storage=storage, tokens=LENGTH)
            logits[name] = run(model, cache, ids, mask, prompt=PROMPT)
    assert 0 < moved(logits["none"], logits[codec]) < GATES[policy, codec]
    if policy == "stream":
        expected = reference(model, ids, mask, prompt=PROMPT)
        assert moved(expected, logits["none"]) < 1e-6
        assert moved(expected, logits[codec]) < GATES[policy, codec]


@pytest.mark.parametrize("codec", CODECS)
def test_quiet_channels_keep_their_precision_beside_loud_ones(codec: str) -> None:
    model = biased_qwen2(60.0)
    ids = tokens(1, 96)
    with attach(model) as session:
        pools = []
        for storage in (StorageConfig(), StorageConfig(codec=codec)):
            cache = session.new_cache(policy="stream", storage=storage)
            feed(model, cache, ids, None, slice(0, 96))
            pools.append(cache.offloaded[0].pool.all())
    (keys, values), (packed_keys, packed_values) = pools
    levels = {"int8": 255, "int4": 15}[codec]
    scale = (keys.amax(3) - keys.amin(3)) / levels  # one scale for all channels of a token
    naive = (keys / scale[..., None]).round() * scale[..., None]
    ours, theirs = ((each - keys)[..., QUIET].abs().mean() for each in (packed_keys, naive))
    assert 0 < ours < theirs / 8
    span = (values.amax(3) - values.amin(3)) / levels
    assert ((packed_values - values).abs() <= 0.501 * span[..., None]).all()


# Composition.


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("policy", ["stream", "infinigen"])
@pytest.mark.parametrize("capacity", [None, 48])
def test_homes_and_late_transfers_do_not_show(
    llama: tuple[Any, Calibration],
    codec: str,
    policy: str,
    capacity: int | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model, _ = llama
    ids, mask = left_padded(tokens(3, 70), (0, 9, 3))
    options: dict[str, Any] = {"codec": codec, "capacity": capacity}

    def logits(name: str) -> Tensor:
        storage = apart(name, tmp_path, **options)
        cache = session.new_cache(policy=policy, storage=storage, tokens=70)
        result = run(model, cache, ids, mask, prompt=40)
        cache.close()
        return result

    with attach(*llama, selecting()) as session:
        with without_threads(monkeypatch):
            expected = logits("disk")
        assert same(logits("emulated"), expected)
        assert same(logits("disk"), expected)
        with delays(monkeypatch, seed=1):
            assert same(logits("disk"), expected)


@pytest.mark.parametrize(("codec", "entry"), [("int8", 16 + 16 + 8), ("int4", 16 + 8)])
@pytest.mark.parametrize("capacity", [None, 100])
def test_packed_entries_cross_once(
    llama: tuple[Any, Calibration],
    codec: str,
    entry: int,
    capacity: int | None,
    tmp_path: Path,
) -> None:
    """Whole groups of 32 as bytes, 16 numbers of key and value each; the tail is on the device."""
    model, _ = llama
    ids = tokens(2, 60)
    with attach(*llama, selecting()) as session:
        storage = apart("emulated", tmp_path, codec=codec, capacity=capacity)
        cache = session.new_cache(policy="stream", storage=storage, tokens=100)
        run(model, cache, ids[:, :42], prompt=40)
        cache.reset_statistics()
        for at in range(42, 60):
            feed(model, cache, ids, None, slice(at, at + 1))
    link = cache.storage.link.statistics
    assert link.transfers == 18 * 4
    whole = 18 * 4 * 2 * 2 * 32 * entry
    if capacity is None:
        assert link.bytes_down == whole
    else:  # the slots of the tail may be anywhere, so they are read too, in vain
        assert whole < link.bytes_down < 2 * whole


def test_int4_homes_are_a_fourth_or_less(llama: tuple[Any, Calibration]) -> None:
    model, _ = llama
    sizes = {}
    with attach(*llama, selecting()) as session:
        for codec in ("none", *CODECS):
            cache = session.new_cache(storage=StorageConfig(codec=codec, link=FAST), tokens=256)
            feed(model, cache, tokens(1, 256), None, slice(0, 256))
            sizes[codec] = cache.home_bytes
    assert sizes["int8"] < 0.32 * sizes["none"] and sizes["int4"] < 0.19 * sizes["none"]


# A model that overflows.


class Breaking:
    """The module's output is NaN in the forwards numbered ``numbers``."""

    def __init__(self, module: nn.Module, *numbers: int) -> None:
        self.calls = 0
        self.numbers = numbers
        self.handle = module.register_forward_hook(self)

    def __call__(self, module: nn.Module, given: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return output * float("nan") if self.calls - 1 in self.numbers else output


def fresh_logits(session: Any, storage: StorageConfig, ids: Tensor) -> Tensor:
    cache = session.new_cache(storage=storage, tokens=70)
    return run(session.model, cache, ids, prompt=40)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
@pytest.mark.parametrize("capacity", [None, 48])
def test_nan_in_a_prompt_is_an_error_and_is_taken_back(
    llama: tuple[Any, Calibration], codec: str, projection: str, capacity: int | None
) -> None:
    model, _ = llama
    ids = tokens(2, 60)
    storage = StorageConfig(codec=codec, capacity=capacity, resident_layers=())
    what = {"k_proj": "keys", "v_proj": "values"}[projection]
    with attach(*llama, selecting()) as session:
        cache: InfiniGenCache = session.new_cache(storage=storage, tokens=70)
        breaking = Breaking(getattr(model.model.layers[1].self_attn, projection), 0)
        with pytest.raises(InfiniGenError, match=rf"numbers of the {what} .*codec='none'"):
            feed(model, cache, ids, None, slice(0, 40))
        breaking.handle.remove()
        assert cache.get_seq_length() == 0
        actual = run(model, cache, ids, prompt=40)
        assert same(actual, fresh_logits(session, storage, ids))


@pytest.mark.parametrize("codec", CODECS)
def test_nan_in_a_step_is_an_error_once_it_is_packed(
    llama: tuple[Any, Calibration], codec: str
) -> None:
    model, _ = llama
    ids = tokens(2, 70)
    storage = StorageConfig(codec=codec, resident_layers=())
    with attach(*llama, selecting()) as session:
        # without a rehearsal, which would refuse the next step's scores
        cache = session.new_cache(storage=storage, tokens=70, policy="stream")
        breaking = Breaking(model.model.layers[1].self_attn.k_proj, 11)  # the token 50
        with pytest.raises(InfiniGenError, match="numbers of the keys cannot be quantised"):
            run(model, cache, ids, prompt=40)
        breaking.handle.remove()
        assert cache.get_seq_length() == 63, "a group of 32 is packed with its last token"
        with pytest.raises(InfiniGenError, match="cannot be quantised"):
            feed(model, cache, ids, None, slice(63, 64))
        cache.reset()
        fresh = session.new_cache(storage=storage, tokens=70, policy="stream")
        assert same(run(model, cache, ids, prompt=40), run(model, fresh, ids, prompt=40))
