"""The comparison behind the demo, against plain generation and plain decode steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny
from command_line import TEXT, tokenizer
from infinigen_kv.cache.forward import forward, prefill
from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.calibration.run import calibrate
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import InputError
from infinigen_kv.session.attach import attach
from infinigen_kv_lab.bench.comparison import Comparison, compare
from infinigen_kv_lab.figures.layer_picture import plot_layers

CONFIG = InfiniGenConfig(alpha=2.0, recent_tokens=8, min_context=64)
STEPS = 12


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return torch.tensor([tokenizer()(TEXT[:200])["input_ids"]])


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def calibration(family: str) -> Calibration:
    return calibrate(tiny.TINY[family](), tokenizer(), [TEXT], tokens=512, use_cache=False)


@pytest.fixture(scope="module")
def result(family: str, calibration: Calibration, prompt: torch.Tensor) -> Comparison:
    return compare(
        tiny.TINY[family](),
        tokenizer(),
        calibration,
        {"everything": InfiniGenConfig(alpha=1e6, max_fetch=1.0), "ours": CONFIG},
        prompt,
        new_tokens=STEPS,
    )


def test_full_cache_gives_the_models_own_tokens(
    family: str, result: Comparison, prompt: torch.Tensor
) -> None:
    output = tiny.TINY[family]().generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=STEPS, do_sample=False
    )
    full = result.systems[0]
    assert full.name == "full"
    assert list(full.token_ids) == output[0, prompt.shape[1] :].tolist()
    assert full.kl_mean == 0
    assert full.same_prefix == full.same_tokens == result.new_tokens == STEPS


def test_fetching_everything_equals_the_full_cache(result: Comparison) -> None:
    full, everything, _ = result.systems
    assert everything.token_ids == full.token_ids
    assert everything.kl_mean == pytest.approx(0, abs=1e-5)


@torch.no_grad()
def test_numbers_are_those_of_single_decode_steps(
    family: str, result: Comparison, calibration: Calibration, prompt: torch.Tensor
) -> None:
    model = tiny.TINY[family]()
    full, _, ours = result.systems
    recorder = FetchRecorder()
    divergences = []
    with attach(model, calibration, CONFIG) as session:
        selected = session.new_cache()
        exact = session.new_cache(policy="stream")
        for cache in (selected, exact):
            prefill(session, cache, prompt)
        selected.recorder = recorder
        for token in full.token_ids:
            step = torch.tensor([[token]])
            p = forward(model, step, exact)[0, -1].log_softmax(-1)
            q = forward(model, step, selected)[0, -1].log_softmax(-1)
            divergences.append(float((p.exp() * (p - q)).sum()))
    assert ours.kl_mean == pytest.approx(sum(divergences) / STEPS, rel=1e-3, abs=1e-6)
    assert ours.kl_mean > 1e-5
    assert ours.fetched_by_layer == pytest.approx(recorder.fetched_by_layer)
    assert ours.fetched_share < 1


def test_counts_of_equal_tokens(result: Comparison) -> None:
    full, _, ours = result.systems
    different = [at for at in range(STEPS) if full.token_ids[at] != ours.token_ids[at]]
    assert ours.same_tokens == STEPS - len(different)
    assert ours.same_prefix == min([*different, STEPS])


def test_end_token_ends_an_answer(prompt: torch.Tensor) -> None:
    model = tiny.llama()
    calibration = calibrate(model, tokenizer(), [TEXT], tokens=512, use_cache=False)
    plain = compare(model, tokenizer(), calibration, {}, prompt, new_tokens=STEPS)
    third = plain.systems[0].token_ids[2]
    model.generation_config.eos_token_id = [third]
    ended = compare(model, tokenizer(), calibration, {"ours": CONFIG}, prompt, new_tokens=STEPS)
    expected = plain.systems[0].token_ids
    assert ended.systems[0].token_ids == expected[: expected.index(third) + 1]
    assert ended.new_tokens == expected.index(third) + 1


@pytest.mark.parametrize(
    ("names", "new_tokens", "reason"),
    [(("full",), 1, "'full' is taken"), (("a",), 0, "new_tokens=0"), (("a",), 400, "600 tokens")],
)
def test_refusals(
    prompt: torch.Tensor, names: tuple[str, ...], new_tokens: int, reason: str
) -> None:
    model = tiny.llama()
    calibration = calibrate(model, tokenizer(), [TEXT], tokens=512, use_cache=False)
    with pytest.raises(InputError, match=reason):
        compare(
            model,
            tokenizer(),
            calibration,
            dict.fromkeys(names, CONFIG),
            prompt,
            new_tokens=new_tokens,
        )


def test_picture(result: Comparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "layers.png"
    plot_layers(result, path, title="a title")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[at : at + 4]) for at in (16, 20))
    assert (width, height) == (1600, 1300)
    assert list(tmp_path.iterdir()) == [path]
