"""`calibrate` against sums recomputed from recorded activations, and what it leaves behind."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calibrating import calibrate_tiny, reference, run, selecting, tokens
from infinigen_kv import attach
from infinigen_kv.calibration.artefact import HEADER, TENSORS, Calibration
from infinigen_kv.calibration.collect import Collector
from infinigen_kv.calibration.replacing import aside_of
from infinigen_kv.calibration.run import FEWEST_TOKENS, calibrate
from infinigen_kv.errors import (
    CalibrationError,
    InfiniGenError,
    InputError,
    UnsupportedModelError,
)
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.rehearsal.predictor import RIDGE
from tiny import TINY, llama, qwen2

TEXTS = ["It was the best of times, " * 12, "call me Ishmael; " * 20]
SMALL: dict[str, Any] = {"tokens": 500, "window": 64, "rank": 4}


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(getattr(module, kind))
        for module in model.modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    )


def modes_of(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def activations(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Outputs of all modules with one output, float64, rows of the batch end to end."""
    seen = {}
    handles = []
    for name, module in model.named_modules():

        def keep(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            if isinstance(output, Tensor):
                seen[name] = output.double().flatten(0, 1)

        handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("build", [llama, qwen2])
def test_the_sums_are_those_of_recorded_activations(build: Any) -> None:
    """Here x is what the norm before the previous attention puts out, q what q_proj does."""
    model = build()
    adapter = adapter_for(model)
    windows = torch.randint(3, 100, (2, 20), generator=torch.Generator().manual_seed(0))
    collector = Collector(adapter)
    with torch.no_grad(), collector.watching():
        for window in windows:
            adapter.decoder(input_ids=window[None], use_cache=False)
    assert sorted(collector.sums) == [1, 2, 3]
    seen = [activations(model, window[None]) for window in windows]
    for index, sums in collector.sums.items():
        x = torch.cat([each[f"model.layers.{index - 1}.input_layernorm"] for each in seen])
        x = torch.cat([x, torch.ones(len(x), 1)], dim=1)
        q = torch.cat([each[f"model.layers.{index}.self_attn.q_proj"] for each in seen])
        close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-3}
        torch.testing.assert_close(sums.input_moment, x.T @ x, **close)
        torch.testing.assert_close(sums.cross_moment, x.T @ q, **close)
        torch.testing.assert_close(sums.query_power, q.square().sum(0), **close)
        assert sums.tokens == 40
        # a rotation in the plane of two dimensions keeps the trace over each KV head's queries
        spec = adapter.layers[index]
        by_head = q.view(40, spec.num_kv_heads, -1).square().sum((0, 2))
        trace = sums.query_moment.diagonal(dim1=-2, dim2=-1).sum(-1)
        torch.testing.assert_close(trace, by_head, **close)


def test_the_correction_is_the_ridge_fit_of_the_activations(tokenizer: Any) -> None:
    """With all ranks kept, W_Q + down up solves the ridge problem."""
    model = llama()
    made = calibrate(model, tokenizer, TEXTS, **{**SMALL, "rank": 1000, "tokens": 652})
    pieces = [torch.tensor(tokenizer(text)["input_ids"]).split(64) for text in TEXTS]
    windows = [window for piece in pieces for window in piece if len(window) > 1]
    assert sum(len(window) for window in windows) == 652
    seen = [activations(model, window[None]) for window in windows]
    for index, layer in made.layers.items():
        x = torch.cat([each[f"model.layers.{index - 1}.input_layernorm"] for each in seen])
        x = torch.cat([x, torch.ones(len(x), 1)], dim=1)
        q = torch.cat([each[f"model.layers.{index}.self_attn.q_proj"] for each in seen])
        weight = model.model.layers[index].self_attn.q_proj.weight.double()
        own = torch.cat([weight.T, torch.zeros(1, len(weight))]).detach()
        strength = (RIDGE * (x.T @ x).diagonal().mean()).sqrt()
        rows = torch.cat([x, strength * torch.eye(x.shape[1])])
        wanted = torch.linalg.lstsq(rows, torch.cat([q, strength * own])).solution
        found = own + layer.down.double() @ layer.up.double()
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
        error = (x @ found - q).square().sum() / q.square().sum()
        assert made.report[str(index)]["unexplained"] == pytest.approx(error.item(), rel=1e-3)
        error = (x @ own - q).square().sum() / q.square().sum()
        assert made.report[str(index)]["own_weights"] == pytest.approx(error.item(), rel=1e-3)


@pytest.mark.parametrize("family", TINY)
def test_every_family_is_calibrated_where_attention_is_full(family: str, tokenizer: Any) -> None:
    model = TINY[family]()
    adapter = adapter_for(model)
    made = calibrate(model, tokenizer, TEXTS, **SMALL)
    full = [spec for spec in adapter.layers if spec.index > 0 and not spec.is_sliding]
    assert list(made.layers) == [spec.index for spec in full]
    made.check_model(adapter)
    for spec in full:
        layer = made.layers[spec.index]
        assert layer.down.shape == (adapter.hidden_size + 1, 4)
        assert layer.up.shape == (4, spec.num_heads * spec.head_dim)
        identity = torch.eye(spec.head_dim).expand(spec.num_kv_heads, -1, -1)
        torch.testing.assert_close(layer.skew.mT @ layer.skew, identity, atol=1e-4, rtol=0.0)
        fit = made.report[str(spec.index)]
        assert 0 <= fit["unexplained"] < fit["own_weights"]


def test_a_second_call_reads_the_cache(
    tokenizer: Any, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    first = calibrate(model, tokenizer, TEXTS, **SMALL)
    assert len(list((cache_folder / "calibrations").iterdir())) == 1

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("calibrated a second time")

    monkeypatch.setattr(model.model, "forward", refuse)
    second = calibrate(model, tokenizer, TEXTS, **SMALL)
    for index, layer in first.layers.items():
        assert torch.equal(layer.down, second.layers[index].down)
        assert torch.equal(layer.up, second.layers[index].up)
        assert torch.equal(layer.skew, second.layers[index].skew)
    assert (second.fingerprint, second.settings) == (first.fingerprint, first.settings)
    for change in ({"tokens": 400}, {"window": 50}, {"rank": 3}, {"use_cache": False}):
        with pytest.raises(AssertionError, match="a second time"):
            calibrate(model, tokenizer, TEXTS, **{**SMALL, **change})
    with pytest.raises(AssertionError, match="a second time"):
        calibrate(model, tokenizer, TEXTS[::-1], **SMALL)


@pytest.mark.parametrize("name", [TENSORS, HEADER])
def test_a_damaged_cache_entry_is_made_again(
    name: str, tokenizer: Any, cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama()
    first = calibrate(model, tokenizer, TEXTS, **SMALL)
    (entry,) = (cache_folder / "calibrations").iterdir()
    whole = (entry / name).read_bytes()
    (entry / name).write_bytes(whole[: len(whole) // 2])
    with caplog.at_level(logging.WARNING):
        second = calibrate(model, tokenizer, TEXTS, **SMALL)
    assert "ignoring the cached calibration" in caplog.text
    assert torch.equal(second.layers[1].down, first.layers[1].down)
    assert Calibration.load(entry).settings == first.settings


def test_a_cache_entry_of_an_earlier_version_is_made_again(
    tokenizer: Any, cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calibrate(llama(), tokenizer, TEXTS, **SMALL)
    (entry,) = (cache_folder / "calibrations").iterdir()
    header = json.loads((entry / HEADER).read_text())
    (entry / HEADER).write_text(json.dumps({**header, "format": 1}))
    with pytest.raises(CalibrationError, match=r"has format 1, .*: calibrate again"):
        Calibration.load(entry)
    with caplog.at_level(logging.WARNING):
        calibrate(llama(), tokenizer, TEXTS, **SMALL)
    assert "ignoring the cached calibration" in caplog.text
    assert Calibration.load(entry).layers


def test_a_cache_entry_is_found_whose_replacement_was_cut_off(
    tokenizer: Any, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    first = calibrate(model, tokenizer, TEXTS, **SMALL)
    (entry,) = (cache_folder / "calibrations").iterdir()
    entry.rename(aside_of(entry))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("calibrated a second time")

    monkeypatch.setattr(model.model, "forward", refuse)
    second = calibrate(model, tokenizer, TEXTS, **SMALL)
    assert torch.equal(second.layers[1].down, first.layers[1].down)


def test_without_the_cache_nothing_is_written(tokenizer: Any, cache_folder: Path) -> None:
    calibrate(llama(), tokenizer, TEXTS, **SMALL, use_cache=False)
    assert not list(cache_folder.glob("calibrations/*"))


@pytest.mark.parametrize("texts", [[], [""], ["x"], ["short text"], ["x" * (FEWEST_TOKENS - 1)]])
def test_too_little_text(texts: list[str], tokenizer: Any) -> None:
    with pytest.raises(InputError, match=r"calibration text has \d+ tokens: .* at least 256"):
        calibrate(llama(), tokenizer, texts)


def test_many_short_texts_are_as_good_as_a_long_one(tokenizer: Any) -> None:
    seen = record_windows(tokenizer, ["ten tokens"] * 100, tokens=600, window=64)
    assert [len(window) for window in seen] == [10] * 60


def test_a_single_string_is_one_text(tokenizer: Any) -> None:
    seen = record_windows(tokenizer, "abc " * 100, tokens=400, window=100)
    assert [len(window) for window in seen] == [100] * 4


@pytest.mark.parametrize(("tokens", "window"), [(300, 64), (300, 512), (1000, 7), (640, 64)])
def test_no_more_tokens_than_asked_for(tokens: int, window: int, tokenizer: Any) -> None:
    seen = record_windows(tokenizer, ["abc " * 1000, "xyz " * 1000], tokens=tokens, window=window)
    assert sum(len(each) for each in seen) == tokens
    assert max(len(each) for each in seen) <= window


def test_the_sample_is_spread_over_all_texts(tokenizer: Any) -> None:
    seen = record_windows(tokenizer, [c * 256 for c in "abcdefgh"], tokens=512, window=32)
    first = {int(window[0]) for window in seen}
    assert len(first) == 8


def test_windows_are_no_longer_than_the_model(tokenizer: Any) -> None:
    model = llama(max_position_embeddings=40)
    made = calibrate(model, tokenizer, TEXTS, tokens=500, rank=2)
    assert made.settings["window"] == 40


def record_windows(
    tokenizer: Any, texts: Sequence[str], *, tokens: int, window: int
) -> list[Tensor]:
    """The windows that `calibrate` feeds to the model."""
    seen: list[Tensor] = []

    def watch(items: Sequence[Any], description: str) -> Iterable[Any]:
        seen.extend(item[0] for item in items)
        return items

    calibrate(llama(), tokenizer, texts, tokens=tokens, window=window, rank=2, progress=watch)
    return seen


@pytest.mark.parametrize("name", ["tokens", "window", "rank"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
def test_bad_numbers_are_named(name: str, value: Any, tokenizer: Any) -> None:
    with pytest.raises(InputError, match=rf"^{name}={value!r} is not valid: .* integer >= \d$"):
        calibrate(llama(), tokenizer, TEXTS, **{name: value})


def test_an_unsupported_model(tokenizer: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16))
    with pytest.raises(UnsupportedModelError):
        calibrate(model, tokenizer, TEXTS)


def test_queries_whose_squares_overflow_are_a_clear_error(
    tokenizer: Any, cache_folder: Path
) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.mul_(1e25)
    with pytest.raises(
        InfiniGenError, match="layer 1 contain NaN or infinity, or queries too large"
    ):
        calibrate(model, tokenizer, TEXTS)


def test_a_model_that_computes_nan_is_a_clear_error(tokenizer: Any, cache_folder: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(3e38)  # sums of such overflow
    with pytest.raises(InfiniGenError, match="layer 2 contain NaN or infinity"):
        calibrate(model, tokenizer, TEXTS, **SMALL)
    assert not list(cache_folder.glob("calibrations/*"))


def test_a_model_with_a_nan_does_not_get_the_calibration_of_its_healthy_twin(
    tokenizer: Any, cache_folder: Path
) -> None:
    healthy, broken = llama(intermediate_size=512), llama(intermediate_size=512)
    calibrate(healthy, tokenizer, TEXTS, **SMALL)
    with torch.no_grad():
        broken.model.layers[2].mlp.up_proj.weight[0, 1] = float("nan")
    with pytest.raises(InfiniGenError, match=r"contain NaN .*\(in layers\.2\.mlp\.up_proj"):
        calibrate(broken, tokenizer, TEXTS, **SMALL)


@pytest.mark.parametrize("part", ["self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj"])
def test_a_fine_tuned_model_is_calibrated_on_its_own(
    part: str, tokenizer: Any, cache_folder: Path
) -> None:
    tuned = llama()
    with torch.no_grad():
        tuned.get_submodule(f"model.layers.1.{part}").weight.mul_(1.2)
    base = calibrate(llama(), tokenizer, TEXTS, **SMALL)
    cached = calibrate(tuned, tokenizer, TEXTS, **SMALL)
    fresh = calibrate(tuned, tokenizer, TEXTS, **SMALL, use_cache=False)
    for index, layer in fresh.layers.items():
        assert torch.equal(cached.layers[index].down, layer.down)
    assert not torch.equal(base.layers[3].down, fresh.layers[3].down)


def test_another_output_head_changes_no_number_of_a_calibration(tokenizer: Any) -> None:
    """So it need not count."""
    model = llama()
    before = calibrate(model, tokenizer, TEXTS, **SMALL, use_cache=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    after = calibrate(model, tokenizer, TEXTS, **SMALL, use_cache=False)
    before.check_model(adapter_for(model))
    for index, layer in before.layers.items():
        for name in ("down", "up", "skew"):
            assert torch.equal(getattr(layer, name), getattr(after.layers[index], name))


class Stop(Exception):  # noqa: N818
    """Raised in the middle of a calibration."""


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, Stop])
@pytest.mark.parametrize("mode", ["train", "eval", "mixed"])
def test_the_model_is_left_as_it_was(
    mode: str, error: type[BaseException] | None, tokenizer: Any, cache_folder: Path
) -> None:
    model = llama(attention_dropout=0.5)
    model.train(mode != "eval")
    if mode == "mixed":
        model.model.layers[2].eval()  # as when some layers are frozen
    modes = modes_of(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = hooks_of(model)

    def stop_midway(items: Sequence[Any], description: str) -> Iterable[Any]:
        for place, item in enumerate(items):
            if error is not None and place == 2:
                assert hooks_of(model) > hooks
                assert not any(modes_of(model))
                raise error
            yield item

    if error is None:
        calibrate(model, tokenizer, TEXTS, **SMALL, progress=stop_midway)
    else:
        with pytest.raises(error):
            calibrate(model, tokenizer, TEXTS, **SMALL, progress=stop_midway)
        assert not list(cache_folder.glob("calibrations/*"))
    assert modes_of(model) == modes
    assert hooks_of(model) == hooks
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_it_is_the_same_every_time_and_in_training_mode(tokenizer: Any) -> None:
    model = llama(attention_dropout=0.5)
    evaluated = calibrate(model.eval(), tokenizer, TEXTS, **SMALL, use_cache=False)
    trained = calibrate(model.train(), tokenizer, TEXTS, **SMALL, use_cache=False)
    for index, layer in evaluated.layers.items():
        assert torch.equal(layer.down, trained.layers[index].down)


@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
@pytest.mark.parametrize("halved", ["the model", "the calibration's"])
def test_a_calibration_serves_the_same_model_in_half_precision(family: str, halved: str) -> None:
    """As one that was made in the model's own type."""
    single, half = TINY[family](), TINY[family]().half()
    used, other = (half, single) if halved == "the model" else (single, half)
    ids = tokens(1, 48)
    logits = []
    for made in (used, other):
        with attach(used, calibrate_tiny(made), selecting()) as session:
            logits.append(run(used, session.new_cache(), ids, prompt=40)[:, 40:].float())
    own, others = (each.log_softmax(-1) for each in logits)
    exact = reference(used, ids, prompt=40)[:, 40:].float().log_softmax(-1)
    harm = (own.exp() * (own - others)).sum(-1).mean()
    selected = (exact.exp() * (exact - own)).sum(-1).mean()
    assert harm < 0.05 * selected, "far less than what selecting costs"
