"""`measure_fidelity` against plain forwards of the model, and at its limits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from infinigen_kv import Calibration, InfiniGenCache, InfiniGenConfig, attach, calibrate
from infinigen_kv.cache.forward import cache_argument, forward, prefill
from infinigen_kv.errors import InputError
from infinigen_kv_lab.bench.fidelity import BLOCK, forgetting, measure_fidelity
from tiny import MAX_POSITIONS, TINY, VOCABULARY, llama

PROMPT = 60


def selecting(**changes: Any) -> InfiniGenConfig:
    """Few tokens of a short context."""
    settings = {"alpha": 1.0, "recent_tokens": 3, "max_fetch": 0.25, "min_context": 16}
    return InfiniGenConfig.from_dict({**settings, **changes})


def covering(rehearsal: str = "calibrated") -> InfiniGenConfig:
    """Selects, and always everything."""
    return InfiniGenConfig.from_dict(
        {
            "rehearsal": rehearsal,
            "alpha": 1e6,
            "recent_tokens": 0,
            "sink_tokens": 0,
            "max_fetch": 1.0,
            "min_context": 1,
        }
    )


def text(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def fitted(model: PreTrainedModel) -> Calibration:
    def tokenizer(sample: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": text(len(sample), seed=1).tolist()}

    return calibrate(model, cast(Any, tokenizer), ["x" * 400], window=64, rank=8, use_cache=False)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


@pytest.fixture(scope="module")
def calibration(model: PreTrainedModel) -> Calibration:
    return fitted(model)


@torch.no_grad()
def plain_log_probabilities(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """``(T, V)`` of the model as it comes, float64."""
    return model(input_ids=tokens[None], use_cache=False).logits[0].double().log_softmax(-1)


def perplexity(log_probabilities: Tensor, tokens: Tensor, prompt: int) -> float:
    """Of the tokens after the first that follows the prompt."""
    losses = [
        -log_probabilities[place - 1, tokens[place]].item()
        for place in range(prompt + 1, len(tokens))
    ]
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("rehearsal", ["calibrated", "paper"])
@pytest.mark.parametrize("family", TINY)
def test_selecting_everything_changes_nothing(family: str, rehearsal: str) -> None:
    model = TINY[family]()
    tokens = text(PROMPT + 40)
    result = measure_fidelity(
        model, fitted(model), covering(rehearsal), tokens, prompt_tokens=PROMPT
    )
    assert result.kl_mean == pytest.approx(0.0, abs=1e-5)
    assert result.kl_p99 == pytest.approx(0.0, abs=1e-4)
    assert result.top1_same == 1.0
    assert result.decode_tokens == 40
    expected = perplexity(plain_log_probabilities(model, tokens), tokens, PROMPT)
    assert result.ppl_full == pytest.approx(expected, rel=1e-3)
    assert result.ppl == pytest.approx(expected, rel=1e-3)
    if family == "mistral_sliding":  # no layer attends in full
        assert math.isnan(result.fetched_share)
        assert result.recall_by_layer == {}
        return
    assert result.fetched_share == result.fetched_share_all_layers == 1.0
    assert result.recall_mean == pytest.approx(1.0)
    assert result.coverage_mean == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("decoded", [2, 40, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK + 1])
def test_the_figures_are_those_of_single_decode_steps(
    model: PreTrainedModel, calibration: Calibration, decoded: int
) -> None:
    """KL, agreement and perplexities from a loop over steps and one plain forward."""
    tokens = text(PROMPT + decoded)
    config = selecting()
    result = measure_fidelity(model, calibration, config, tokens, prompt_tokens=PROMPT)
    full = plain_log_probabilities(model, tokens)
    with torch.no_grad(), attach(model, calibration, config) as session:
        cache = session.new_cache()
        prefill(session, cache, tokens[None, :PROMPT])
        steps = [
            forward(model, tokens[None, at : at + 1], cache) for at in range(PROMPT, len(tokens))
        ]
    ours = torch.cat(steps, dim=1)[0].double().log_softmax(-1)
    reference = full[PROMPT:]
    kl = (reference.exp() * (reference - ours)).sum(-1)
    assert kl.min() > 1e-6  # every single position selects, in the last block too
    assert result.decode_tokens == decoded
    assert result.prompt_tokens == PROMPT
    assert result.kl_mean == pytest.approx(kl.mean().item(), rel=1e-2)
    assert result.kl_p99 == pytest.approx(kl.quantile(0.99).item(), rel=1e-2)
    same = (reference.argmax(-1) == ours.argmax(-1)).double().mean().item()
    assert result.top1_same == pytest.approx(same, abs=1e-9)
    assert result.ppl_full == pytest.approx(perplexity(full, tokens, PROMPT), rel=1e-3)
    selected = torch.cat([full[:PROMPT], ours])
    assert result.ppl == pytest.approx(perplexity(selected, tokens, PROMPT), rel=1e-2)
    assert 0.0 < result.fetched_share <= 0.25
    assert result.fetched_by_layer[0] == 1.0
    share = sum(result.fetched_by_layer.values()) / 4
    assert result.fetched_share_all_layers == pytest.approx(share)
    for figure in (result.recall_mean, result.coverage_mean):
        assert 0.0 < figure < 1.0


def test_one_decoded_token(model: PreTrainedModel, calibration: Calibration) -> None:
    result = measure_fidelity(
        model, calibration, selecting(), text(PROMPT + 1), prompt_tokens=PROMPT
    )
    assert result.decode_tokens == 1
    assert result.kl_mean > 1e-6  # the full attention that it is compared with does not select
    assert 0.0 < result.fetched_share <= 0.25
    assert math.isnan(result.ppl_full)  # no token whose probability would be known


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_sliding_layers_go_back_before_the_comparison(family: str) -> None:
    """Their windows are full long before the prompt ends."""
    model = TINY[family]()
    tokens = text(PROMPT + BLOCK + 30)
    result = measure_fidelity(model, fitted(model), selecting(), tokens, prompt_tokens=PROMPT)
    expected = perplexity(plain_log_probabilities(model, tokens), tokens, PROMPT)
    assert result.ppl_full == pytest.approx(expected, rel=1e-3)
    assert result.kl_mean > 1e-6
    assert list(result.fetched_by_layer) == [1, 3]


def test_layers_before_the_first_speculated_one_are_counted_apart(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    config = selecting(first_layer=3)
    result = measure_fidelity(model, calibration, config, text(100), prompt_tokens=PROMPT)
    assert list(result.recall_by_layer) == list(result.coverage_by_layer) == [3]
    assert result.fetched_share == result.fetched_by_layer[3] <= 0.25
    assert [result.fetched_by_layer[layer] for layer in range(3)] == [1.0] * 3


def test_a_context_too_short_for_selection_fetches_nothing_and_is_exact(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    config = selecting(min_context=300)
    result = measure_fidelity(model, calibration, config, text(100), prompt_tokens=PROMPT)
    assert result.kl_mean == pytest.approx(0.0, abs=1e-6)
    assert math.isnan(result.fetched_share)


def test_a_cap_that_leaves_no_token_is_no_fault(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    config = selecting(recent_tokens=0, sink_tokens=0, max_fetch=0.001)
    for decoded in (1, 40):
        tokens = text(PROMPT + decoded)
        result = measure_fidelity(model, calibration, config, tokens, prompt_tokens=PROMPT)
        assert result.fetched_share == 0.0


@pytest.mark.parametrize("prompt", [0, -1, 100, 101, 10_000])
def test_a_prompt_that_leaves_nothing_to_decode(
    prompt: int, model: PreTrainedModel, calibration: Calibration
) -> None:
    message = rf"^prompt_tokens={prompt} is not valid: .*at least 1.*the text has 100 tokens$"
    with pytest.raises(InputError, match=message):
        measure_fidelity(model, calibration, selecting(), text(100), prompt_tokens=prompt)


def test_more_tokens_than_the_model_has_positions(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    tokens = text(MAX_POSITIONS + 1)
    with pytest.raises(InputError, match=f"{MAX_POSITIONS + 1} tokens .* {MAX_POSITIONS}"):
        measure_fidelity(model, calibration, selecting(), tokens, prompt_tokens=PROMPT)


@pytest.mark.parametrize("decoded", [40, BLOCK + 1])
def test_progress_counts_blocks_of_both_passes(
    model: PreTrainedModel, calibration: Calibration, decoded: int
) -> None:
    seen = []

    def watch(items: Any, description: str) -> Any:
        seen.append((description, len(items)))
        return items

    measure_fidelity(
        model,
        calibration,
        selecting(),
        text(PROMPT + decoded),
        prompt_tokens=PROMPT,
        progress=watch,
    )
    blocks = math.ceil(decoded / BLOCK)
    assert seen == [("selected attention", blocks), ("full attention", blocks)]


@pytest.mark.parametrize("change", [lambda model: None, lambda model: model.train()])
def test_the_model_is_left_as_it_was(
    change: Callable[[PreTrainedModel], object], calibration: Calibration
) -> None:
    model = llama()
    change(model)
    mode = model.training
    tokens = text(100)
    before = reference_logits(model, tokens)
    measure_fidelity(model, calibration, selecting(), tokens, prompt_tokens=PROMPT)
    assert model.training == mode
    assert torch.equal(reference_logits(model, tokens), before)


@torch.no_grad()
def reference_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    arguments = {cache_argument(model): DynamicCache(config=model.config)}
    return model(input_ids=tokens[None], **arguments).logits


def test_the_result_is_plain_values(model: PreTrainedModel, calibration: Calibration) -> None:
    result = measure_fidelity(model, calibration, selecting(), text(100), prompt_tokens=PROMPT)
    values = json.loads(json.dumps(result.to_dict()))
    assert values["decode_tokens"] == 40
    assert set(values["fetched_by_layer"]) == {"0", "1", "2", "3"}
    needed = {
        "fetched_share", "kl_mean", "kl_p99", "top1_same", "ppl_full", "ppl", "recall_mean",
        "recall_by_layer", "fetched_by_layer", "coverage_mean", "seconds",
    }  # fmt: skip
    assert needed <= set(values)


def _fail_after(work: Callable[[], object], cache: InfiniGenCache) -> None:
    with forgetting(cache), cache.decoding():
        work()
        raise ZeroDivisionError


@torch.no_grad()
def test_a_failing_block_is_forgotten_too(model: PreTrainedModel, calibration: Calibration) -> None:
    tokens = text(PROMPT + 10)[None]
    with attach(model, calibration, selecting()) as session:
        cache, untouched = session.new_cache(), session.new_cache()
        for each in (cache, untouched):
            prefill(session, each, tokens[:, :PROMPT])
        with pytest.raises(ZeroDivisionError):
            _fail_after(lambda: forward(model, tokens[:, PROMPT:], cache), cache)
        assert cache.get_seq_length() == PROMPT
        following = tokens[:, PROMPT : PROMPT + 1]
        assert torch.equal(forward(model, following, cache), forward(model, following, untouched))
