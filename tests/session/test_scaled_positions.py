"""Models with scaled rotary positions: how long a text they take, and that it is read as it is."""

from __future__ import annotations

from typing import Any

import pytest
from torch.testing import assert_close

import tiny
from calibrating import calibrate_tiny, covering, generate, reference, run, tokens
from command_line import tokenizer
from infinigen_kv import InputError, LanguageModel, attach
from infinigen_kv.cache.forward import prefill
from infinigen_kv.memory import model_request
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.models.loading import LoadedModel

UNSCALED = 64
PROMPT = 100
THETA = 10_000.0
LONG = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}


def model_of(kind: str) -> Any:
    """A new one: Transformers keeps the frequencies of the longest text in the model."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": THETA, "factor": 4.0}
    if kind != "dynamic":
        rope["original_max_position_embeddings"] = UNSCALED
    if kind == "longrope":
        rope |= LONG
    positions = tiny.MAX_POSITIONS if kind == "longrope" else UNSCALED
    return tiny.llama(rope_parameters=rope, max_position_embeddings=positions)


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope"])
@pytest.mark.parametrize("policy", ["ideal", "infinigen"])
def test_a_text_beyond_the_unscaled_positions(kind: str, policy: str) -> None:
    ids = tokens(2, PROMPT + 8)
    expected = reference(model_of(kind), ids, prompt=PROMPT)
    calibration = calibrate_tiny(model_of(kind))
    model = model_of(kind)
    with attach(model, calibration, covering()) as session:
        actual = run(model, session.new_cache(policy=policy), ids, prompt=PROMPT)
    assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_are_those_of_the_whole_prompt(kind: str) -> None:
    """However small the pieces that are asked for."""
    ids = tokens(1, PROMPT)
    expected = reference(model_of(kind), ids, prompt=PROMPT)[:, -1:]
    model = model_of(kind)
    with attach(model) as session:
        for policy in ("ideal", "stream"):
            actual = prefill(session, session.new_cache(policy=policy), ids, chunk=30)
            assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        short = ids[:, :UNSCALED]
        actual = prefill(session, session.new_cache(policy="ideal"), short, chunk=30)
    assert_close(actual, reference(model_of(kind), short, prompt=UNSCALED)[:, -1:])
    plans = [model_request(model, context=each + 8, new_tokens=8, prompt_chunk=30) for each in (
        PROMPT, UNSCALED,
    )]  # fmt: skip
    assert [plan.chunk for plan in plans] == [PROMPT, 22]  # 64 tokens in three pieces


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_language_model_reads_it_as_transformers_does(kind: str) -> None:
    text = "".join(chr(97 + int(each)) for each in tokens(1, PROMPT)[0] % 26)
    made = LoadedModel(model_of(kind), tokenizer(), "tiny")
    llm = LanguageModel(made, calibrate_tiny(model_of(kind)), covering())
    ids = llm.encode(text)
    assert ids.shape[1] > UNSCALED
    expected = generate(model_of(kind), ids, new=8)
    found = llm.generate(text, max_new_tokens=8, prompt_chunk=30)
    assert list(found.token_ids) == expected[0].tolist()


@pytest.mark.parametrize(
    ("stated", "rope", "readable"),
    [
        (64, {"rope_type": "default"}, 64),
        (64, {"rope_type": "dynamic", "factor": 2.0}, None),
        (64, {"rope_type": "linear", "factor": 4.0}, 256),
        (64, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        # as in the files of Qwen3, which name more than the length of the training
        (80, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        # as in those of DeepSeek, which name the scaled length
        (256, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        (256, {"rope_type": "longrope", "original_max_position_embeddings": 64, **LONG}, 256),
        (
            512,
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            512,
        ),
    ],
)
def test_positions_that_a_model_can_read(
    stated: int, rope: dict[str, Any], readable: int | None
) -> None:
    model = tiny.llama(
        rope_parameters={"rope_theta": THETA, **rope}, max_position_embeddings=stated
    )
    assert adapter_for(model).max_positions == readable
    with attach(model) as session:
        session.check_length(readable or 10**9)
        if readable is not None:
            with pytest.raises(InputError, match=f"more than the model's {readable} positions"):
                session.check_length(readable + 1)


def test_layers_of_both_kinds_must_reach() -> None:
    """Gemma 3's files name the scaled length, and scale the layers with full attention only."""
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": THETA, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": THETA},
    }
    assert adapter_for(tiny.gemma3(rope_parameters=rope)).max_positions == tiny.MAX_POSITIONS
